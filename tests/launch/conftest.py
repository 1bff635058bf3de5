"""Runs that several tests look at, made once."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders.launched_runs import TWO_BY_TWO, LaunchedRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LaunchedRun]:
    """A run directory that does not exist yet; what a failed test leaves running is ended."""
    run = LaunchedRun(tmp_path / "run")
    yield run
    run.kill_what_is_left()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> LaunchedRun:
    """An undisturbed run of two targets and two drafters."""
    run = LaunchedRun(tmp_path_factory.mktemp("reference") / "run").start(*TWO_BY_TWO, is_cold=True)
    assert run.end() == 0, run.log_tails()
    return run


@pytest.fixture(scope="session")
def small_reference(tmp_path_factory: pytest.TempPathFactory) -> LaunchedRun:
    """An undisturbed run of one target and one drafter."""
    run = LaunchedRun(tmp_path_factory.mktemp("small") / "run").start(is_cold=True)
    assert run.end() == 0, run.log_tails()
    return run
