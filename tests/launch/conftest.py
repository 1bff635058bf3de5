"""Runs and models that several tests only read, made once."""

import fcntl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.smollm2 import DEFAULT_FOLDER, convert
from tests.builders.launched_runs import TWO_BY_TWO, LaunchedRun


@pytest.fixture
def run(tmp_path: Path) -> Iterator[LaunchedRun]:
    """Make a run in a directory that does not exist yet; kill what a failed test leaves running."""
    run = LaunchedRun(tmp_path / "run")
    yield run
    run.kill_what_is_left()


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> LaunchedRun:
    """Run two targets and two drafters undisturbed."""
    run = LaunchedRun(tmp_path_factory.mktemp("reference") / "run").start(*TWO_BY_TWO, is_cold=True)
    assert run.end() == 0, run.log_tails()
    return run


@pytest.fixture(scope="session")
def small_reference(tmp_path_factory: pytest.TempPathFactory) -> LaunchedRun:
    """Run one target and one drafter undisturbed."""
    run = LaunchedRun(tmp_path_factory.mktemp("small") / "run").start(is_cold=True)
    assert run.end() == 0, run.log_tails()
    return run


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Convert SmolLM2 once, to the folder of the demo; one worker at a time."""
    folder = DEFAULT_FOLDER.expanduser()
    with (Path(tempfile.gettempdir()) / "headrace-smollm2.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        convert(folder)
    return folder
