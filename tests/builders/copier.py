"""A process that copies between a slot and its device, over and over, until it is killed."""

import multiprocessing
import os
import select
import signal
import time
from ctypes import c_int64
from typing import NamedTuple

import torch

from common.ring.layout import SlotLayout
from common.ring.ring import RingWriter

SPAWN = multiprocessing.get_context("spawn")  # nothing forks after CUDA
_IN_FLIGHT = 4


class Ring(NamedTuple):
    """A ring as another process can open it."""

    path: str
    layout: SlotLayout
    num_slots: int

    @classmethod
    def of(cls, fd: int, layout: SlotLayout, num_slots: int) -> "Ring":
        """The ring behind a descriptor of this process."""
        return cls(f"/proc/{os.getpid()}/fd/{fd}", layout, num_slots)

    def open(self) -> RingWriter:
        """Map it, populate it, register it."""
        return RingWriter(os.open(self.path, os.O_RDWR | os.O_CLOEXEC), self.layout, self.num_slots)


class Copier:
    """The process, and how many copies it has done."""

    def __init__(self, ring: Ring, index: int, device: torch.device, *, into_slot: bool) -> None:
        self._num_copies = SPAWN.Value(c_int64, 0)
        arguments = (ring, index, device, into_slot, self._num_copies)
        self._process = SPAWN.Process(target=_copy_until_killed, args=arguments, daemon=True)
        self._process.start()

    def count(self) -> int:
        """Copies done so far; 0 until it is under way."""
        if not self._process.is_alive():
            raise RuntimeError(f"a copying process ended by itself, exit code {self._process.exitcode}")
        return int(self._num_copies.value)

    def kill(self) -> float:
        """End it by SIGKILL; seconds until the kernel reported its end."""
        assert self._process.pid is not None
        pidfd = os.pidfd_open(self._process.pid)
        began = time.perf_counter()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        select.select([pidfd], [], [])
        died_s = time.perf_counter() - began
        os.close(pidfd)
        return died_s


def wait_until_copying(copiers: list[Copier]) -> None:
    """Until each of them copies."""
    while not all(copier.count() for copier in copiers):
        time.sleep(0.01)


def _copy_until_killed(ring: Ring, index: int, device: torch.device, into_slot: bool, num_copies: "c_int64") -> None:
    torch.set_num_threads(1)
    hidden_states = ring.open().open(index, ring.layout.capacity_tokens, 1).hidden_states
    near = [torch.full_like(hidden_states, value, device=device) for value in (1.0, 2.0)]
    while True:
        for turn in range(_IN_FLIGHT):
            if into_slot:
                hidden_states.copy_(near[turn % 2], non_blocking=True)
            else:
                near[turn % 2].copy_(hidden_states, non_blocking=True)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        num_copies.value += _IN_FLIGHT
