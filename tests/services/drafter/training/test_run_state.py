"""The progress of a run: from a checkpoint, from another rank, and after an interrupted transfer."""

import pytest
import torch

from services.drafter.training.run_state import UNKNOWN, RunState
from tests.builders.batches import make_evaluation

ROUNDS = torch.tensor([[3, 1], [4, 0]])


def make_run() -> RunState:
    """An evaluation of n rounds has the acceptance n."""
    return RunState(torch.zeros(2, 2, dtype=torch.int64), lambda rounds, step: make_evaluation(step, float(rounds.sum())))


def test_a_receiver_has_all_that_the_sender_has() -> None:
    sender, receiver = make_run(), make_run()
    assert (sender.position, sender.evaluation_of(3)) == (UNKNOWN, None)
    sender.resume(0, None)
    sender.position += 6
    sender.record_evaluation(ROUNDS, step=3)
    for skipped in (True, False, True, True):
        sender.record_step(skipped=skipped)
    receiver.begin_transfer()
    state = receiver.state_dict()
    for name, tensor in sender.state_dict().items():
        state[name].copy_(tensor)  # as a broadcast does, in place
    receiver.load_state_dict(state)
    assert (receiver.position, receiver.num_skipped, receiver.is_just_evaluated) == (6, 2, True)
    expected = make_evaluation(3, 8.0)
    assert [receiver.evaluation, receiver.evaluation_of(3), receiver.evaluation_of(4)] == [expected, expected, None]
    receiver.position += 6
    assert not receiver.is_just_evaluated


def test_a_receiver_keeps_the_evaluation_of_a_checkpoint_where_the_sender_has_made_none() -> None:
    sender, receiver = make_run(), make_run()
    sender.resume(6, None)
    receiver.resume(0, make_evaluation(3, 1.5))
    receiver.load_state_dict(sender.state_dict())
    assert receiver.evaluation == make_evaluation(3, 1.5) and not receiver.is_just_evaluated


def test_an_interrupted_transfer_needs_a_checkpoint() -> None:
    run = make_run()
    run.resume(6, None)
    run.record_step(skipped=True)
    run.begin_transfer()
    assert run.position == UNKNOWN
    with pytest.raises(RuntimeError, match="there is no checkpoint: start afresh"):
        run.resume(0, None)
    run.resume(6, make_evaluation(3, 1.5))
    assert (run.position, run.num_skipped, run.evaluation) == (6, 0, make_evaluation(3, 1.5))
    run.resume(0, None)  # the weights are whole again
