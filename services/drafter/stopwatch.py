"""Where the time of a step goes: events on a GPU's stream, read when they are over; the clock on the CPU."""

import time

import torch


class Stopwatch:
    """Starts when it is made."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._names: list[str] = []
        self._marks = [self._mark()]

    def lap(self, name: str) -> None:
        """End a part of the step; nothing waits."""
        self._names.append(name)
        self._marks.append(self._mark())

    def laps_s(self) -> dict[str, float]:
        """Seconds of each lap, called when the device has passed the last."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return {name: self._between_s(*pair) for name, pair in zip(self._names, pairs, strict=True)}

    def _mark(self) -> "torch.cuda.Event | float":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @staticmethod
    def _between_s(start: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return float(start.elapsed_time(end)) * 1e-3
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
