"""The state of every slot, in the control memory. The exchange is its only writer; every process may read it.

A record is changed field by field, the state word last, so that an exchange killed between two
stores leaves either the old state or the new one, never a mixture.
"""

import enum
from typing import NamedTuple

import numpy as np

from common.errors import SharedMemoryError
from common.ring import memory

_MAGIC = 0x4843_4152_4441_4548  # "HEADRACH"
_WORDS = ("generation", "batch", "owner_pid", "owner_start", "state")
_RECORD = np.dtype([*((name, "<i8") for name in _WORDS), ("spare", "<i8", 3)])


class SlotState(enum.IntEnum):
    """The states of a slot; services/exchange/leases.py draws the edges between them."""

    FREE = 0
    WRITING = 1
    READY = 2
    READING = 3


class Owner(NamedTuple):
    """A process, named so that a reused pid is another process."""

    pid: int
    start_time: int


NOBODY = Owner(0, 0)
NO_BATCH = -1


class SlotRecord(NamedTuple):
    """One slot. `batch` and `owner` mean nothing while FREE, `owner` nothing while READY."""

    state: SlotState
    generation: int
    batch: int
    owner: Owner


def table_bytes(num_slots: int) -> int:
    return memory.round_up(memory.PAGE_BYTES + num_slots * _RECORD.itemsize, memory.PAGE_BYTES)


class SlotTable:
    """The records of all slots of all rings; slot s is slot s % num_slots of ring s // num_slots."""

    def __init__(self, fd: int, num_slots: int) -> None:
        view = memoryview(memory.attach(fd, "control memory", table_bytes(num_slots)))
        self._magic = np.frombuffer(view, "<u8", count=1)
        self._records = np.frombuffer(view, _RECORD, count=num_slots, offset=memory.PAGE_BYTES)

    def __len__(self) -> int:
        return len(self._records)

    def claim(self) -> None:
        """Mark the memory as a slot table; fresh memory is all FREE, used memory stays as it is."""
        if int(self._magic[0]) not in (0, _MAGIC):
            raise SharedMemoryError(f"control memory: needed a slot table, found magic {int(self._magic[0]):#x}")
        self._magic[0] = _MAGIC

    def read(self, slot: int) -> SlotRecord:
        generation, batch, pid, start_time, state, _ = self._records[slot].item()
        return SlotRecord(SlotState(state), generation, batch, Owner(pid, start_time))

    def write(self, slot: int, record: SlotRecord) -> None:
        """Replace the record of one slot, the state word last."""
        stored = self._records[slot : slot + 1]
        stored["generation"] = record.generation
        stored["batch"] = record.batch
        stored["owner_pid"] = record.owner.pid
        stored["owner_start"] = record.owner.start_time
        stored["state"] = record.state

    def counts(self) -> dict[SlotState, int]:
        """Count the slots in each state."""
        states = self._records["state"].tolist()
        return {state: states.count(state) for state in SlotState}
