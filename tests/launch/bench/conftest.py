"""Trials of the bench commands that start warm."""

from collections.abc import Iterator

import pytest
import torch

from launch.bench.harness import trial
from tests.builders.launched_runs import ROOT
from tests.builders.warm_start import WarmProcess


@pytest.fixture(scope="module")
def warm_trials() -> Iterator[None]:
    """Start every Trial of a module as tests/builders/warm_start.py does; on a GPU they start cold."""
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setattr(trial.Trial, "start", _start)
        yield


def _start(self: trial.Trial) -> WarmProcess:
    arguments = [str(self._path), "--run-dir", str(self.run_dir), "--set", *self._overrides]
    return WarmProcess(arguments, ROOT, self.run_dir / "output", self.run_dir / "output")
