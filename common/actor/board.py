"""The notice board: one record per actor in shared memory, written by that actor only.

    | number of the drafters' group, written by the supervisor | record of actor 0 | record of actor 1 | ...

The supervisor reads progress and figures without a message, so it can show and judge an actor that no longer
answers. Drafters read the number of the current group and which drafters have joined it.
"""

import enum
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from common.ring import memory

_HEAD_BYTES = 128


class Phase(enum.IntEnum):
    """Phases of an incarnation, in order."""

    STARTING = 0
    WARMING_UP = 1
    READY = 2


class Notice(NamedTuple):
    """One actor's record, as read. Times are CLOCK_MONOTONIC seconds."""

    pid: int
    phase: Phase
    progress_s: float
    step: int
    num_steps: int
    num_batches: int
    num_tokens: int
    waiting_s: float
    loss: float
    acceptance: float
    group: int  # number of the group that this drafter has joined
    in_collective: bool  # it waits for other drafters
    num_skipped: int = 0  # steps of the run that were not finite and left the weights alone


_RECORD = np.dtype([(name, "<f8" if kind is float else "<i8") for name, kind in Notice.__annotations__.items()])


def board_bytes(num_actors: int) -> int:
    return memory.round_up(_HEAD_BYTES + num_actors * _RECORD.itemsize, memory.PAGE_BYTES)


class Board:
    """All records, to read. Only the supervisor calls the methods that write."""

    def __init__(self, fd: int, num_actors: int) -> None:
        view = memoryview(memory.attach(fd, "board memory", board_bytes(num_actors)))
        self._group = np.frombuffer(view, "<i8", count=1)
        self._records = np.frombuffer(view, _RECORD, count=num_actors, offset=_HEAD_BYTES)

    @property
    def group(self) -> int:
        """The number of the current group of drafters; every death among them starts a new group."""
        return int(self._group[0])

    def start_group(self, number: int) -> None:
        """Call the drafters together for a new group."""
        self._group[0] = number

    def read(self, index: int) -> Notice:
        """Read the record of one actor; figures may be of two neighbouring moments."""
        notice = Notice._make(self._records[index].item())
        return notice._replace(phase=Phase(notice.phase), in_collective=bool(notice.in_collective))

    def wipe(self, index: int) -> None:
        """Clear the record before the actor's next incarnation starts."""
        self._records[index] = np.zeros((), _RECORD)
        self._records["progress_s"][index] = time.monotonic()


class Notices:
    """An actor's own record, to write."""

    def __init__(self, fd: int, index: int, pid: int) -> None:
        view = memoryview(memory.attach(fd))
        self._record = np.frombuffer(view, _RECORD, count=1, offset=_HEAD_BYTES + index * _RECORD.itemsize)
        self._record["pid"] = pid
        self.progress()

    def progress(self) -> None:
        """Say that the actor is alive; the main loop calls it in every turn, also while it waits."""
        self._record["progress_s"] = time.monotonic()

    def phase(self, phase: Phase) -> None:
        self._record["phase"] = phase
        self.progress()

    def come_to_group(self, number: int) -> None:
        """Say which group this drafter has joined."""
        self._record["group"] = number

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Say during the block that this drafter waits for the others, so its silence is not held against it."""
        self._record["in_collective"] = 1
        try:
            yield
        finally:
            self._record["in_collective"] = 0
            self.progress()

    def add(self, *, num_batches: int = 0, num_tokens: int = 0, waiting_s: float = 0.0) -> None:
        """Add to the counts of work done and of time waited."""
        self._record["num_batches"] += num_batches
        self._record["num_tokens"] += num_tokens
        self._record["waiting_s"] += waiting_s
        self.progress()

    def show_step(self, step: int, num_steps: int, loss: float, num_skipped: int = 0) -> None:
        """Show the optimizer step, its loss, and how many steps of the run were skipped."""
        self._record["step"], self._record["num_steps"] = step, num_steps
        self._record["loss"], self._record["num_skipped"] = loss, num_skipped

    def show_acceptance(self, acceptance: float) -> None:
        """Show the latest exact greedy acceptance length."""
        self._record["acceptance"] = acceptance
