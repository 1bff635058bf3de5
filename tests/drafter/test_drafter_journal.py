"""The figures of a step come to the host one step later, and once."""

import torch

from services.drafter.journal import Journal, StepFigures
from services.drafter.optimizer import StepResult


def make_result(loss: float, *, found_inf: float = 0.0, stop: float = 0.0) -> StepResult:
    """Of blocks of three: weighted loss and weight, slots accepted, right per slot, labels per slot, the stop flag."""
    sums = torch.tensor([loss * 2, 2.0, 5.0, 3.0, 1.0, 8.0, 4.0, stop])
    return StepResult(torch.tensor(loss), torch.tensor(0.5), torch.tensor(found_inf), sums)


def test_figures_of_a_step_come_with_the_next() -> None:
    journal = Journal(torch.device("cpu"), num_sums=8)
    assert journal.flush() is None
    assert journal.push(1, make_result(4.0)) is None
    first = StepFigures(1, 4.0, 0.5, skipped=False, stop_requested=False, num_labels=[8, 4], num_correct=[3, 1], num_accepted=5)
    assert journal.push(2, make_result(2.0, found_inf=1.0, stop=1.0)) == first
    assert journal.flush() == first._replace(step=2, loss=2.0, skipped=True, stop_requested=True)
    assert journal.flush() is None


def test_figures_are_those_of_the_moment_they_were_sent_off() -> None:
    journal = Journal(torch.device("cpu"), num_sums=8)
    result = make_result(4.0)
    journal.push(1, result)
    for tensor in (result.loss, result.grad_norm, result.sums):
        tensor.zero_()
    figures = journal.flush()
    assert figures is not None
    assert (figures.loss, figures.grad_norm, figures.num_labels) == (4.0, 0.5, [8, 4])
