"""A window of steps traced with torch.profiler, for chrome://tracing or perfetto: `<run>/profile/<actor>.json`."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

log = logging.getLogger(__name__)


class StepProfiler:
    """Traces the steps from `window[0]` to `window[1]`, counted from 1; an empty window traces nothing."""

    def __init__(self, path: Path, window: list[int]) -> None:
        self._path = path
        self._window = window
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start the trace before the first step of the window; a run resumed inside the window starts it there."""
        if self._profile is None and self._window and self._window[0] <= step <= self._window[1]:
            gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
            self._profile.start()

    def after(self, step: int) -> None:
        """End the trace after the last step of the window."""
        if self._window and step >= self._window[1]:
            self.close()

    def close(self) -> None:
        """Write the trace if one is running; waits for the device."""
        if self._profile is not None:
            self._profile.stop()
            self._path.parent.mkdir(exist_ok=True)
            self._profile.export_chrome_trace(str(self._path))
            self._profile = None
            log.info("trace written: %s", self._path)
