"""Every edge from every state."""

import pytest

from common.errors import TransitionError
from common.ring.slot_table import NO_BATCH, NOBODY, Owner, SlotRecord, SlotState
from services.exchange.leases import Edge, Leases, move
from tests.builders.small_runs import make_table

ALLOWED = {
    ("FREE", "LEASE"): "WRITING",
    ("WRITING", "PUBLISH"): "READY",
    ("WRITING", "ABANDON"): "FREE",
    ("READY", "GRANT"): "READING",
    ("READY", "EVICT"): "FREE",
    ("READING", "RELEASE"): "FREE",
    ("READING", "RETURN"): "READY",
}
TARGET, DRAFTER = Owner(11, 1), Owner(22, 2)


@pytest.mark.parametrize("state", SlotState)
@pytest.mark.parametrize("edge", Edge)
def test_an_edge_leads_where_the_drawing_says_or_nowhere(state: SlotState, edge: Edge) -> None:
    record = SlotRecord(state, 5, 7, TARGET)
    after = ALLOWED.get((state.name, edge.name))
    if after is None:
        with pytest.raises(TransitionError, match=f"5: {state.name} has no edge {edge.name}"):
            move(record, edge)
    else:
        assert move(record, edge) == SlotRecord(SlotState[after], 5, 7, TARGET)


def test_a_slot_goes_through_all_its_states() -> None:
    leases = Leases(make_table(4), num_rings=2)
    assert leases.lease(3, 7, TARGET) == SlotRecord(SlotState.WRITING, 1, 7, TARGET)
    assert leases.is_current(3, 1, TARGET, SlotState.WRITING)
    assert leases.follow(3, Edge.PUBLISH).state == SlotState.READY
    assert leases.grant(3, DRAFTER) == SlotRecord(SlotState.READING, 1, 7, DRAFTER)
    assert not leases.is_current(3, 1, TARGET, SlotState.READING)
    assert leases.batches() == {7: 3}
    assert leases.follow(3, Edge.RELEASE).state == SlotState.FREE
    assert leases.batches() == {}
    assert leases.lease(3, 9, TARGET).generation == 2
    assert leases.read(0) == SlotRecord(SlotState.FREE, 0, 0, NOBODY)


def test_the_generation_rises_with_a_lease_only() -> None:
    leases = Leases(make_table(1), num_rings=1)
    leases.lease(0, 1, TARGET)
    generations = []
    for edge in (Edge.PUBLISH, Edge.GRANT, Edge.RETURN, Edge.EVICT, Edge.LEASE, Edge.ABANDON, Edge.LEASE):
        if edge == Edge.GRANT:
            record = leases.grant(0, DRAFTER)
        elif edge == Edge.LEASE:
            record = leases.lease(0, 1, TARGET)
        else:
            record = leases.follow(0, edge)
        generations.append(record.generation)
    assert generations == [1, 1, 1, 1, 2, 2, 3]


def test_a_slot_belongs_to_one_ring_and_is_in_one_state() -> None:
    leases = Leases(make_table(6), num_rings=2)
    leases.lease(4, 1, TARGET)
    assert [leases.ring_of(slot) for slot in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [slot for slot, _ in leases.in_state(SlotState.FREE, 1)] == [3, 5]
    assert [slot for slot, _ in leases.in_state(SlotState.WRITING)] == [4]
    assert leases.in_state(SlotState.WRITING, 0) == []
    assert not leases.is_current(6, 1, TARGET, SlotState.WRITING)
    assert not leases.is_current(-2, 1, TARGET, SlotState.WRITING)


def test_slots_of_a_dead_process_are_reclaimed_and_no_others() -> None:
    leases = Leases(make_table(6), num_rings=1)
    for slot in range(5):
        leases.lease(slot, slot, TARGET if slot != 1 else Owner(TARGET.pid, TARGET.start_time + 1))
    for slot in (2, 3, 4):
        leases.follow(slot, Edge.PUBLISH)
    leases.grant(3, TARGET)
    leases.grant(4, DRAFTER)
    leases.reclaim(TARGET)
    states = [leases.read(slot).state for slot in range(6)]
    expected = ["FREE", "WRITING", "READY", "READY", "READING", "FREE"]
    assert [state.name for state in states] == expected
    leases.reclaim(TARGET)
    assert [leases.read(slot).state for slot in range(6)] == states


def test_a_batch_number_in_a_free_slot_means_nothing() -> None:
    leases = Leases(make_table(2), num_rings=1)
    leases.lease(0, NO_BATCH, TARGET)
    leases.lease(1, 5, TARGET)
    leases.follow(1, Edge.ABANDON)
    assert leases.batches() == {}
