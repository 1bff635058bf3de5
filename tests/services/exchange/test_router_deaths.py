"""Deaths, late messages of dead processes and wrong checksums, message by message."""

import pytest

from common.actor.messages import (
    PROTOCOL_VERSION,
    ActorDied,
    Done,
    Hello,
    Next,
    Release,
    RequestBody,
    SlotReady,
    Stale,
    Work,
)
from common.errors import ProtocolError
from common.ring.slot_table import Owner, SlotState
from services.exchange.router import MAX_BAD_SLOTS
from tests.builders.routed_run import DRAFTER, SUPERVISOR, TARGET, Run
from tests.builders.small_runs import make_config, make_incarnation


@pytest.fixture
def run() -> Run:
    """One target with two slots, one drafter that waits for batch 0."""
    run = Run(make_config())
    assert run.ask(DRAFTER, Next(0)) is None
    return run


@pytest.mark.parametrize("generation", [0, 2, -1, 2**70])
def test_another_generation_gives_no_right(run: Run, generation: int) -> None:
    lease = run.lease()
    assert run.ask(TARGET, SlotReady(lease.slot, generation)) == Stale()
    assert run.states() == ["WRITING", "FREE"]
    run.ask(TARGET, SlotReady(lease.slot, lease.generation))
    assert run.ask(DRAFTER, Release(lease.slot, generation, intact=True)) == Stale()
    assert run.states() == ["READING", "FREE"]


@pytest.mark.parametrize("body", [Hello(PROTOCOL_VERSION), Work([]), SlotReady(0, 1)])
def test_an_earlier_incarnation_changes_nothing(run: Run, body: RequestBody) -> None:
    lease = run.lease(make_incarnation("target", number=2))
    assert run.ask(TARGET, body) == Stale()
    assert run.table.read(lease.slot).owner == Owner(make_incarnation("target", number=2).pid, 2)
    assert run.states() == ["WRITING", "FREE"]


@pytest.mark.parametrize("body", [Next(0), Release(0, 1, intact=True), Hello(PROTOCOL_VERSION)])
def test_the_reported_dead_change_nothing(run: Run, body: RequestBody) -> None:
    run.fill()
    assert run.ask(SUPERVISOR, ActorDied(DRAFTER.pid, DRAFTER.start_time)) == Done()
    assert run.ask(DRAFTER, body) == Stale()
    assert run.states() == ["READY", "FREE"]


def test_the_end_of_a_target_frees_what_it_was_writing_and_keeps_what_is_ready(run: Run) -> None:
    run.fill()
    lost = run.lease()
    died = ActorDied(TARGET.pid, TARGET.start_time)
    assert [run.ask(SUPERVISOR, died), run.ask(SUPERVISOR, died)] == [Done(), Done()]
    assert run.states() == ["READING", "FREE"]
    again = run.lease(make_incarnation("target", number=2))
    assert (again.slot, again.info, again.sample_ids) == (lost.slot, lost.info, lost.sample_ids)
    assert again.generation == lost.generation + 1


def test_the_end_of_a_drafter_makes_its_slot_ready_again(run: Run) -> None:
    run.fill()
    run.ask(SUPERVISOR, ActorDied(DRAFTER.pid, DRAFTER.start_time))
    assert run.states() == ["READY", "FREE"]
    assert run.grant(0, make_incarnation("drafter", number=2)).generation == 1


@pytest.mark.parametrize("role", ["target", "drafter"])
def test_the_hello_of_a_successor_proves_the_end_of_its_predecessor(role: str) -> None:
    run = Run(make_config(num_targets=2, num_drafters=2, num_slots=1))
    for rank in range(2):
        run.ask(make_incarnation("drafter", rank), Next(rank))
        run.lease(make_incarnation("target", rank))
    if role == "drafter":
        for rank in range(2):
            run.ask(make_incarnation("target", rank), SlotReady(rank, 1))
    run.ask(make_incarnation(role, 1, number=2), Hello(PROTOCOL_VERSION))
    assert run.states() == (["WRITING", "FREE"] if role == "target" else ["READING", "READY"])


def test_a_wrong_checksum_has_the_batch_produced_again(run: Run) -> None:
    run.fill()
    assert run.ask(DRAFTER, Release(0, 1, intact=False)) == Done()
    run.ask(DRAFTER, Next(0))
    assert run.fill().info.batch == 0
    assert run.batches(SlotState.READING) == [0]


def test_three_wrong_checksums_in_a_row_refuse_the_target_until_it_is_restarted(run: Run) -> None:
    for intact in (False, False, True, False, False, False):
        lease = run.fill()
        run.ask(DRAFTER, Release(lease.slot, lease.generation, intact))
        run.ask(DRAFTER, Next(lease.info.batch + intact))
    with pytest.raises(ProtocolError, match=f"target-0: {MAX_BAD_SLOTS} slots in a row"):
        run.ask(TARGET, Work([]))
    successor = make_incarnation("target", number=2)
    run.ask(successor, Hello(PROTOCOL_VERSION))
    assert run.lease(successor).info.batch == 1
