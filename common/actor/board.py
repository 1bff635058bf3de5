"""The notice board: one record per actor in shared memory, written by that actor only.

    | the supervisor's word: the life of the drafters' group | record of actor 0 | record of actor 1 | ...

The supervisor reads progress and figures from it without asking, so it can show and judge an actor
that no longer answers. Drafters read from it which life of their group is the current one, and who
has come to it.
"""

import enum
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

from common.errors import SharedMemoryError
from common.ring import memory

_RECORD = np.dtype(
    [
        ("pid", "<i8"),
        ("phase", "<i8"),
        ("progress_s", "<f8"),
        ("step", "<i8"),
        ("num_steps", "<i8"),
        ("num_batches", "<i8"),
        ("num_tokens", "<i8"),
        ("waiting_s", "<f8"),
        ("loss", "<f8"),
        ("acceptance", "<f8"),
        ("group", "<i8"),
        ("in_collective", "<i8"),
        ("num_skipped", "<i8"),
    ]
)
_HEAD_BYTES = 128


class Phase(enum.IntEnum):
    """How far an incarnation is."""

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
    group: int  # the life of the drafters' group that this drafter has come to
    in_collective: bool  # it waits for other drafters
    num_skipped: int = 0  # steps of the run that were not finite and left the weights alone


def board_bytes(num_actors: int) -> int:
    """Size of the board memory of a run."""
    return memory.round_up(_HEAD_BYTES + num_actors * _RECORD.itemsize, memory.PAGE_BYTES)


class Board:
    """All records, to read; what changes others' words is the supervisor's to call."""

    def __init__(self, fd: int, num_actors: int) -> None:
        mapping = memory.attach(fd)
        if len(mapping) != board_bytes(num_actors):
            raise SharedMemoryError(f"board memory: needed {board_bytes(num_actors)} bytes, found {len(mapping)}")
        self._group = np.frombuffer(memoryview(mapping), "<i8", count=1)
        self._records = np.frombuffer(memoryview(mapping), _RECORD, count=num_actors, offset=_HEAD_BYTES)

    @property
    def group(self) -> int:
        """The current life of the drafters' group; a new one starts with every death among them."""
        return int(self._group[0])

    def start_group(self, life: int) -> None:
        """Call the drafters together for a new life of their group."""
        self._group[0] = life

    def read(self, place: int) -> Notice:
        """The record of one actor; figures may be of two neighbouring moments."""
        values = self._records[place].item()
        return Notice._make([values[0], Phase(values[1]), *values[2:11], bool(values[11]), *values[12:]])

    def wipe(self, place: int) -> None:
        """Clear the record before the actor's next life starts."""
        self._records[place] = np.zeros((), _RECORD)
        self._records["progress_s"][place] = time.monotonic()


class Notices:
    """An actor's side: its own record, to write."""

    def __init__(self, fd: int, place: int, pid: int) -> None:
        self._record = np.frombuffer(
            memoryview(memory.attach(fd)), _RECORD, count=1, offset=_HEAD_BYTES + place * _RECORD.itemsize
        )
        self._record["pid"] = pid
        self.progress()

    def progress(self) -> None:
        """Say that the actor is alive: called where the main loop passes, also while it waits."""
        self._record["progress_s"] = time.monotonic()

    def phase(self, phase: Phase) -> None:
        """Say how far this incarnation is."""
        self._record["phase"] = phase
        self.progress()

    def come_to_group(self, life: int) -> None:
        """Say to which life of the group this drafter has come."""
        self._record["group"] = life

    @contextmanager
    def collective(self) -> Iterator[None]:
        """Say for the time of the block that this drafter waits for the others: not its own silence."""
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
        self._record["num_skipped"] = num_skipped
        self._record["step"] = step
        self._record["num_steps"] = num_steps
        self._record["loss"] = loss

    def show_acceptance(self, acceptance: float) -> None:
        """Show the latest exact greedy acceptance length."""
        self._record["acceptance"] = acceptance
