"""Every number of a step has a name and one position, and all of them are one tensor."""

import torch

from services.drafter.model.step_sums import SlotSums, StepSums


def test_the_names_are_views_that_cover_the_tensor_once() -> None:
    sums = StepSums(torch.zeros(StepSums.size(block_size=4)))
    views = [sums.loss, sums.weight, sums.selector_loss, sums.accepted, sums.accepted_unary, sums.accepted_oracle]
    for number, view in enumerate([*views, sums.correct, sums.recalled, sums.labels, sums.stop]):
        view.add_(number + 1.0)
    assert sums.values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 7.0, 7.0, 8.0, 8.0, 8.0, 9.0, 9.0, 9.0, 10.0]
    assert StepSums.size(1) == 7 and len(StepSums(torch.zeros(7)).labels) == 0


def test_sums_of_a_batch_stop_no_rank() -> None:
    counts = SlotSums(*(torch.tensor(number) for number in (3.0, 2.0, 5.0)), *(torch.ones(2) * number for number in (1, 6, 8)))
    sums = StepSums.of(torch.tensor(7.0), torch.tensor(2.0), torch.tensor(4.0), counts)
    assert sums.values.tolist() == [7.0, 2.0, 4.0, 3.0, 2.0, 5.0, 1.0, 1.0, 6.0, 6.0, 8.0, 8.0, 0.0]
    assert (float(sums.loss), float(sums.accepted), float(sums.stop)) == (7.0, 3.0, 0.0)
    assert (sums.correct.tolist(), sums.recalled.tolist(), sums.labels.tolist()) == ([1.0, 1.0], [6.0, 6.0], [8.0, 8.0])
