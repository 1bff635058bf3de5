"""The life of a slot: a drawing, a table and one function.

              LEASE               PUBLISH               GRANT
      FREE ---------> WRITING ------------> READY ------------------> READING
       ^                 |                   |  ^                       |   |
       |     ABANDON     |      EVICT        |  +------- RETURN --------+   |
       +-----------------+-------------------+                              |
       +---------------------------- RELEASE -------------------------------+

LEASE     a target may fill the slot            ABANDON   the target died before it announced
PUBLISH   the target has filled it              RETURN    the drafter died before it released
GRANT     a drafter may copy it out             EVICT     a batch nobody waits for makes room
RELEASE   the drafter has its copy

ABANDON and RETURN follow only the kernel's word that the owner is dead.
"""

import enum

from common.actor import faults
from common.errors import TransitionError
from common.ring.slot_table import NO_BATCH, Owner, SlotRecord, SlotState, SlotTable


class Edge(enum.Enum):
    """What may happen to a slot."""

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
    """The record after `edge`; TransitionError where its state has no such edge."""
    after = TRANSITIONS.get((record.state, edge))
    if after is None:
        raise TransitionError(f"slot generation {record.generation}: {record.state.name} has no edge {edge.name}")
    return record._replace(state=after)


class Leases:
    """All slots of all rings, and the only hand that writes their states."""

    def __init__(self, table: SlotTable, num_rings: int) -> None:
        table.claim()
        self._table = table
        self.num_rings = num_rings
        self._slots_per_ring = len(table) // num_rings

    def ring_of(self, slot: int) -> int:
        """The ring, and so the target, that a slot belongs to."""
        return slot // self._slots_per_ring

    def read(self, slot: int) -> SlotRecord:
        """The record of a slot."""
        return self._table.read(slot)

    def __len__(self) -> int:
        return len(self._table)

    def lease(self, slot: int, batch: int, owner: Owner) -> SlotRecord:
        """FREE -> WRITING under a new generation."""
        record = move(self.read(slot), Edge.LEASE)
        return self._store(slot, record._replace(generation=record.generation + 1, batch=batch, owner=owner))

    def grant(self, slot: int, owner: Owner) -> SlotRecord:
        """READY -> READING."""
        return self._store(slot, move(self.read(slot), Edge.GRANT)._replace(owner=owner))

    def follow(self, slot: int, edge: Edge) -> SlotRecord:
        """Any edge that changes nothing but the state."""
        assert edge not in (Edge.LEASE, Edge.GRANT), "these edges name an owner"
        return self._store(slot, move(self.read(slot), edge))

    def is_current(self, slot: int, generation: int, owner: Owner, state: SlotState) -> bool:
        """Whether that process still has the right that it names."""
        if not 0 <= slot < len(self):
            return False
        record = self.read(slot)
        return (record.state, record.generation, record.owner) == (state, generation, owner)

    def in_state(self, state: SlotState, ring: int | None = None) -> list[tuple[int, SlotRecord]]:
        """The slots in a state, in order; of one ring or of all."""
        first, last = (0, len(self)) if ring is None else (ring * self._slots_per_ring, (ring + 1) * self._slots_per_ring)
        records = [(slot, self.read(slot)) for slot in range(first, last)]
        return [(slot, record) for slot, record in records if record.state == state]

    def batches(self) -> dict[int, int]:
        """The batches that are in a slot, being written, ready or being read -> the slot."""
        return {
            record.batch: slot
            for slot in range(len(self))
            if (record := self.read(slot)).state != SlotState.FREE and record.batch != NO_BATCH
        }

    def bury(self, owner: Owner) -> None:
        """Reclaim all that a dead process had the right to."""
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
