"""A stream for copies beside the computation, and marks in the work of a stream.

A buffer that a copy reads or fills is free again when the mark set after the copy is reached, never earlier, whatever
Python references say. Without CUDA copies are done when they return, and marks are reached.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Mark:
    """A point in the work of a stream."""

    def __init__(self, stream: torch.cuda.Stream | None) -> None:
        self._event = None if stream is None else torch.cuda.Event()  # type: ignore[no-untyped-call]
        if self._event is not None:
            self._event.record(stream)

    def wait(self) -> None:
        """Block the calling thread until the point is reached."""
        if self._event is not None:
            self._event.synchronize()

    def reached(self) -> bool:
        """Return whether the point is reached, without waiting."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def hold(self, stream: torch.cuda.Stream | None) -> None:
        """Make `stream` wait for the point; the calling thread does not wait."""
        if self._event is not None and stream is not None:
            stream.wait_event(self._event)


def mark_computation(device: torch.device) -> Mark:
    """Mark the current end of the calling thread's stream."""
    return Mark(torch.cuda.current_stream(device) if device.type == "cuda" else None)


class CopyStream:
    """The stream on which a process copies between a ring and its device."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """Run the kernels and copies that the block launches on this stream, after `mark`."""
        mark.hold(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> Mark:
        """Mark the current end of this stream."""
        return Mark(self._stream)
