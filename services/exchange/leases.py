"""The states of a slot: a drawing, a table and one function.

              LEASE               PUBLISH               GRANT
      FREE ---------> WRITING ------------> READY ------------------> READING
       ^                 |                   |  ^                       |   |
       |     ABANDON     |      EVICT        |  +------- RETURN --------+   |
       +-----------------+-------------------+                              |
       +---------------------------- RELEASE -------------------------------+

LEASE     a target may fill the slot            ABANDON   the target died before it announced
PUBLISH   the target has filled it              RETURN    the drafter died before it released
GRANT     a drafter may copy it out             EVICT     a batch that nobody waits for makes room
RELEASE   the drafter has its copy

ABANDON and RETURN only follow after the kernel has reported that the owner is dead.
"""

import enum

from common.actor import faults
from common.errors import TransitionError
from common.ring.slot_table import NO_BATCH, Owner, SlotRecord, SlotState, SlotTable


class Edge(enum.Enum):
    LEASE = "lease"
    PUBLISH = "publish"
    GRANT = "grant"
    RELEASE = "release"
    ABANDON = "abandon"
    RETURN = "return"
    EVICT = "evict"


TRANSITIONS: dict[tuple[SlotState, Edge], SlotState] = {
    (SlotState.FREE, Edge.LEASE): SlotState.WRITING,
    (SlotState.WRITING, Edge.PUBLISH): SlotState.READY,
    (SlotState.WRITING, Edge.ABANDON): SlotState.FREE,
    (SlotState.READY, Edge.GRANT): SlotState.READING,
    (SlotState.READY, Edge.EVICT): SlotState.FREE,
    (SlotState.READING, Edge.RELEASE): SlotState.FREE,
    (SlotState.READING, Edge.RETURN): SlotState.READY,
}


def move(record: SlotRecord, edge: Edge) -> SlotRecord:
    """Return the record after `edge`; TransitionError if its state has no such edge."""
    after = TRANSITIONS.get((record.state, edge))
    if after is None:
        raise TransitionError(f"slot generation {record.generation}: {record.state.name} has no edge {edge.name}")
    return record._replace(state=after)


class Leases:
    """The slots of all rings; the only writer of their states."""

    def __init__(self, table: SlotTable, num_rings: int) -> None:
        table.claim()
        self._table = table
        self.num_rings = num_rings
        self._slots_per_ring = len(table) // num_rings

    def ring_of(self, slot: int) -> int:
        return slot // self._slots_per_ring

    def read(self, slot: int) -> SlotRecord:
        return self._table.read(slot)

    def __len__(self) -> int:
        return len(self._table)

    def lease(self, slot: int, batch: int, owner: Owner) -> SlotRecord:
        """Follow LEASE, under a new generation."""
        record = move(self.read(slot), Edge.LEASE)
        return self._store(slot, record._replace(generation=record.generation + 1, batch=batch, owner=owner))

    def grant(self, slot: int, owner: Owner) -> SlotRecord:
        return self._store(slot, move(self.read(slot), Edge.GRANT)._replace(owner=owner))

    def follow(self, slot: int, edge: Edge) -> SlotRecord:
        """Follow an edge that changes nothing but the state."""
        assert edge not in (Edge.LEASE, Edge.GRANT), "these edges name an owner"
        return self._store(slot, move(self.read(slot), edge))

    def is_current(self, slot: int, generation: int, owner: Owner, state: SlotState) -> bool:
        """Return whether that process still has the right that it names."""
        if not 0 <= slot < len(self):
            return False
        record = self.read(slot)
        return (record.state, record.generation, record.owner) == (state, generation, owner)

    def in_state(self, state: SlotState, ring: int | None = None) -> list[tuple[int, SlotRecord]]:
        """Return the slots in a state, in order; of one ring or of all."""
        first, last = (0, len(self)) if ring is None else (ring * self._slots_per_ring, (ring + 1) * self._slots_per_ring)
        records = [(slot, self.read(slot)) for slot in range(first, last)]
        return [(slot, record) for slot, record in records if record.state == state]

    def batches(self) -> dict[int, int]:
        """Return the batches that are being written, ready or being read, and the slot of each."""
        return {
            record.batch: slot
            for slot in range(len(self))
            if (record := self.read(slot)).state != SlotState.FREE and record.batch != NO_BATCH
        }

    def reclaim(self, owner: Owner) -> None:
        """Take back all slots of a dead process."""
        for slot in range(len(self)):
            record = self.read(slot)
            if record.owner != owner:
                continue
            if record.state == SlotState.WRITING:
                self.follow(slot, Edge.ABANDON)
            elif record.state == SlotState.READING:
                self.follow(slot, Edge.RETURN)

    def _store(self, slot: int, record: SlotRecord) -> SlotRecord:
        self._table.write(slot, record)
        faults.reach("exchange.after_store")
        return record
