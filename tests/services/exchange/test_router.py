"""The decisions of the exchange, message by message, without a socket."""

import pytest

from common.actor.messages import (
    PROTOCOL_VERSION,
    ActorDied,
    Done,
    Finished,
    Grant,
    Held,
    Hello,
    Incarnation,
    Lease,
    Next,
    NoBatch,
    Release,
    RequestBody,
    SlotReady,
    Stale,
    Welcome,
    Work,
)
from common.errors import ProtocolError
from common.ring.slot_table import SlotState
from tests.builders.routed_run import DRAFTER, SUPERVISOR, TARGET, Run
from tests.builders.small_runs import PLAN_HASH, make_config, make_incarnation


@pytest.fixture
def run() -> Run:
    """One target with two slots, one drafter that waits for batch 0."""
    run = Run(make_config())
    assert run.ask(DRAFTER, Next(0)) is None
    return run


def test_hello_is_answered_with_the_identity_of_the_run(run: Run) -> None:
    expected = Welcome(PLAN_HASH, run.plan.num_batches, run.plan.num_steps, run.plan.shapes)
    assert run.ask(TARGET, Hello(PROTOCOL_VERSION)) == expected
    assert run.ask(DRAFTER, Hello(PROTOCOL_VERSION)) == expected


def test_a_batch_goes_from_target_to_drafter(run: Run) -> None:
    waiting = run.last_id
    lease = run.lease()
    assert lease == Lease(0, 1, run.plan.info(0), run.plan.sample_ids(0))
    assert run.send(TARGET, SlotReady(0, 1)) == {run.last_id: Done(), waiting: Grant(0, 1, run.plan.info(0))}
    assert run.ask(DRAFTER, Release(0, 1, intact=True)) == Done()
    assert run.states() == ["FREE", "FREE"]
    assert run.lease().info.batch == 1


def test_no_work_before_a_drafter_has_said_where_it_is() -> None:
    run = Run(make_config())
    assert run.ask(TARGET, Work([])) is None
    request_id = run.last_id
    lease = run.send(DRAFTER, Next(4))[request_id]
    assert isinstance(lease, Lease) and lease.lacked == "work"
    assert run.batches(SlotState.WRITING) == [4]


def test_a_ring_is_filled_ahead_and_then_the_target_waits(run: Run) -> None:
    assert [run.fill().info.batch, run.fill().info.batch] == [0, 1]
    assert run.states() == ["READING", "READY"]
    assert run.ask(TARGET, Work([])) is None
    request_id = run.last_id
    lease = run.send(DRAFTER, Release(0, 1, intact=True))[request_id]
    assert isinstance(lease, Lease) and (lease.slot, lease.generation, lease.info.batch) == (0, 2, 2)
    assert lease.lacked == "slot"


def test_a_lost_lease_is_leased_again_and_one_that_arrived_is_not(run: Run) -> None:
    lease = run.lease()
    work = run.last_id
    assert run.send(TARGET, Work([]), work) == {work: lease}
    assert run.lease(held=(Held(lease.slot, lease.generation),)).info.batch == 1


def test_every_copy_of_slot_ready_is_done_until_the_slot_is_leased_again(run: Run) -> None:
    lease = run.fill()
    ready = SlotReady(lease.slot, lease.generation)
    assert run.ask(TARGET, ready) == Done()
    assert run.ask(DRAFTER, Release(0, 1, intact=True)) == Done()
    assert run.ask(TARGET, ready) == Done()
    assert run.lease().generation == 2
    assert run.ask(TARGET, ready) == Stale()
    assert run.states() == ["WRITING", "FREE"]


def test_a_lost_grant_is_granted_again(run: Run) -> None:
    waiting = run.last_id
    run.fill()
    assert run.send(DRAFTER, Next(0), waiting) == {waiting: Grant(0, 1, run.plan.info(0))}


def test_late_copies_of_next_change_nothing(run: Run) -> None:
    waiting = run.last_id
    run.fill()
    run.ask(DRAFTER, Release(0, 1, intact=True))
    assert run.send(DRAFTER, Next(0), waiting) == {waiting: Stale()}
    assert run.lease().info.batch == 1
    assert run.ask(DRAFTER, Next(1)) is None
    assert run.send(DRAFTER, Next(0), waiting) == {waiting: Stale()}
    assert run.lease(held=(Held(0, 2),)).info.batch == 2


def test_every_copy_of_release_is_done_and_a_late_one_is_stale(run: Run) -> None:
    run.fill()
    release = Release(0, 1, intact=True)
    assert run.ask(DRAFTER, release) == Done()
    first = run.last_id
    assert run.send(DRAFTER, release, first) == {first: Done()}
    run.ask(DRAFTER, Next(1))
    run.fill()
    assert run.batches(SlotState.READING) == [1]
    assert run.send(DRAFTER, release, first) == {first: Stale()}
    assert run.batches(SlotState.READING) == [1]


def test_a_grant_that_a_late_copy_caused_is_taken_back_by_the_next_next() -> None:
    run = Run(make_config(num_slots=1))
    run.ask(DRAFTER, Next(0))
    late = run.last_id
    run.fill()
    run.ask(DRAFTER, Release(0, 1, intact=True))
    run.restart()
    run.send(DRAFTER, Next(0), late)  # a new exchange cannot know
    run.fill()
    assert run.batches(SlotState.READING) == [0]
    run.ask(DRAFTER, Next(1))
    assert run.lease().info.batch == 1


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_a_batch_that_is_waited_for_takes_the_slot_of_the_latest(num_slots: int) -> None:
    run = Run(make_config(num_slots=num_slots))
    run.ask(DRAFTER, Next(4))
    run.ask(SUPERVISOR, ActorDied(DRAFTER.pid, DRAFTER.start_time))
    filled = [run.fill().info.batch for _ in range(num_slots)]
    assert filled == list(range(4, 4 + num_slots))
    assert run.ask(TARGET, Work([])) is None
    request_id, back = run.last_id, make_incarnation("drafter", number=2)
    lease = run.send(back, Next(0))[request_id]
    assert isinstance(lease, Lease) and (lease.info.batch, lease.slot) == (0, num_slots - 1)
    assert run.batches(SlotState.READY) == filled[:-1]


def test_nothing_is_evicted_for_a_batch_that_nobody_waits_for_yet(run: Run) -> None:
    run.fill()
    run.fill()
    assert run.ask(TARGET, Work([])) is None
    assert run.states() == ["READING", "READY"]


def test_a_batch_before_the_cursor_leaves_its_slot_even_when_it_comes_late() -> None:
    run = Run(make_config(num_slots=1))
    run.ask(DRAFTER, Next(2))
    lease = run.lease()
    run.ask(DRAFTER, Next(5))
    assert run.ask(TARGET, SlotReady(lease.slot, lease.generation)) == Done()
    assert run.states() == ["FREE"]
    assert run.lease().info.batch == 5


def test_a_new_exchange_on_the_same_slots_goes_on(run: Run) -> None:
    run.fill()
    second = run.lease()
    run.restart()
    assert run.states() == ["READING", "WRITING"]
    assert run.ask(TARGET, SlotReady(second.slot, second.generation)) == Done()
    assert run.ask(DRAFTER, Release(0, 1, intact=True)) == Done()
    assert run.lease().info.batch == 2
    assert run.grant(1).slot == second.slot
    assert run.batches(SlotState.WRITING) == [2]


def test_a_group_that_starts_again_moves_its_cursors_back() -> None:
    run = Run(make_config(num_drafters=2, num_slots=4))
    for rank in range(2):
        run.ask(make_incarnation("drafter", rank), Next(4 + rank))
    assert [run.fill().info.batch for _ in range(3)] == [4, 5, 6]
    for rank in range(2):
        run.ask(make_incarnation("drafter", rank, number=2), Hello(PROTOCOL_VERSION))
        run.ask(make_incarnation("drafter", rank, number=2), Next(2 + rank))
    assert run.states() == ["READY", "READY", "READY", "FREE"]
    assert run.fill().info.batch == 2
    assert run.lease().info.batch == 3
    assert run.batches(SlotState.READING) == [2]


def test_padding_is_answered_at_once_and_no_target_produces_it() -> None:
    run = Run(make_config(num_drafters=4, batches_per_step=4))  # two held-out batches, then two of padding
    assert run.ask(make_incarnation("drafter", 2), Next(2)) == NoBatch(run.plan.info(2))
    assert run.lease().info.batch == 6
    assert run.ask(make_incarnation("drafter", 3), Next(3)) == NoBatch(run.plan.info(3))


def test_the_sequence_has_an_end(run: Run) -> None:
    assert run.ask(DRAFTER, Next(run.plan.num_batches)) == Finished()
    assert run.ask(TARGET, Work([])) is None


@pytest.mark.parametrize(
    ("sender", "body", "message"),
    [
        (TARGET, Hello(PROTOCOL_VERSION + 1), f"protocol version {PROTOCOL_VERSION}, found {PROTOCOL_VERSION + 1}"),
        (make_incarnation("target", 7), Work([]), "Work: needed a target from 0 to 0, found 7"),
        (make_incarnation("target", -1), Hello(PROTOCOL_VERSION), "Hello: needed a target from 0 to 0, found -1"),
        (make_incarnation("drafter", 1), Hello(PROTOCOL_VERSION), "Hello: needed a drafter from 0 to 0, found 1"),
        (TARGET, Next(0), "Next: needed to come from drafter, found 'target'"),
        (DRAFTER, Work([]), "Work: needed to come from target, found 'drafter'"),
        (DRAFTER, ActorDied(1, 1), "ActorDied: needed to come from supervisor, found 'drafter'"),
        (DRAFTER, Next(-1), "found -1"),
        (TARGET, SlotReady(9, 1), "slot: needed 0 to 1, found 9"),
        (TARGET, SlotReady(-1, 1), "slot: needed 0 to 1, found -1"),
        (DRAFTER, Release(2, 1, intact=True), "slot: needed 0 to 1, found 2"),
    ],
)
def test_a_request_without_an_answer_is_refused_and_changes_nothing(
    run: Run, sender: Incarnation, body: RequestBody, message: str
) -> None:
    with pytest.raises(ProtocolError, match=message):
        run.ask(sender, body)
    assert run.fill().info.batch == 0
    assert run.batches(SlotState.READING) == [0]


def test_a_drafter_asks_for_its_own_batches_only() -> None:
    run = Run(make_config(num_drafters=2))
    with pytest.raises(ProtocolError, match=r"needed a batch b with b % 2 = 1, found 4"):
        run.ask(make_incarnation("drafter", 1), Next(4))
