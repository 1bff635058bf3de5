"""Times of parts of the work: events on a GPU's stream, the clock on a CPU."""

import time

import torch


class Stopwatch:
    """Starts when it is made; a GPU's laps are on the given stream, or else on the current one."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self._stream = stream
        self._names: list[str] = []
        self._marks = [self._mark()]

    def lap(self, name: str) -> None:
        """End a part of the work, without waiting."""
        self._names.append(name)
        self._marks.append(self._mark())

    def laps_s(self) -> dict[str, float]:
        """Return seconds by name, summed over laps of one name. The device must have passed the last lap."""
        laps_s = dict.fromkeys(self._names, 0.0)
        for name, start, end in zip(self._names, self._marks, self._marks[1:], strict=False):
            laps_s[name] += self._between_s(start, end)
        return laps_s

    def pause_s(self, before: "Stopwatch") -> float:
        """Return the seconds from the end of watch `before` to the start of this one. The device must have passed both."""
        return self._between_s(before._marks[-1], self._marks[0])

    def _mark(self) -> "torch.cuda.Event | float":
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    @staticmethod
    def _between_s(start: "torch.cuda.Event | float", end: "torch.cuda.Event | float") -> float:
        if isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event):
            return float(start.elapsed_time(end)) * 1e-3
        assert isinstance(start, float) and isinstance(end, float)
        return end - start
