"""The notice board: one record per actor in shared memory, written by that actor only.

The supervisor reads progress and figures from it without asking, so it can show and judge an actor
that no longer answers.
"""

import enum
import time
from typing import NamedTuple

import numpy as np

from common import memory
from common.errors import ProtocolError

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
        ("spare", "<f8", 6),
    ]
)


class Phase(enum.IntEnum):
    """How far an incarnation is."""

    STARTING = 0
    READY = 1
    STOPPING = 2


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


def board_bytes(num_actors: int) -> int:
    """Size of the board memory of a run."""
    return memory.round_up(num_actors * _RECORD.itemsize, memory.PAGE_BYTES)


class Board:
    """The supervisor's side: all records, to read and to wipe before a start."""

    def __init__(self, fd: int, num_actors: int) -> None:
        mapping = memory.attach(fd)
        if len(mapping) != board_bytes(num_actors):
            raise ProtocolError(f"board memory: needed {board_bytes(num_actors)} bytes, found {len(mapping)}")
        self._records = np.frombuffer(memoryview(mapping), _RECORD, count=num_actors)

    def read(self, place: int) -> Notice:
        """The record of one actor; figures may be of two neighbouring moments."""
        values = self._records[place].item()[:10]
        return Notice(values[0], Phase(values[1]), *values[2:])

    def wipe(self, place: int) -> None:
        """Clear the record before the actor's next life starts."""
        self._records[place] = np.zeros((), _RECORD)
        self._records["progress_s"][place] = time.monotonic()


class Notices:
    """An actor's side: its own record, to write."""

    def __init__(self, fd: int, place: int, pid: int) -> None:
        self._record = np.frombuffer(memoryview(memory.attach(fd)), _RECORD, count=1, offset=place * _RECORD.itemsize)
        self._record["pid"] = pid
        self.progress()

    def progress(self) -> None:
        """Say that the actor is alive: called where the main loop passes, also while it waits."""
        self._record["progress_s"] = time.monotonic()

    def phase(self, phase: Phase) -> None:
        """Say how far this incarnation is."""
        self._record["phase"] = phase
        self.progress()

    def add(self, *, num_batches: int = 0, num_tokens: int = 0, waiting_s: float = 0.0) -> None:
        """Add to the counts of work done and of time waited."""
        self._record["num_batches"] += num_batches
        self._record["num_tokens"] += num_tokens
        self._record["waiting_s"] += waiting_s

    def show_step(self, step: int, num_steps: int, loss: float) -> None:
        """Show the optimizer step and its loss."""
        self._record["step"] = step
        self._record["num_steps"] = num_steps
        self._record["loss"] = loss

    def show_acceptance(self, acceptance: float) -> None:
        """Show the latest exact greedy acceptance length."""
        self._record["acceptance"] = acceptance
