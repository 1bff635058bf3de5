"""Actors as real processes, ended with the test."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.actor_stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage
    for child in stage.started:
        child.kill()
        child.wait()
    os.close(stage.board_fd)
