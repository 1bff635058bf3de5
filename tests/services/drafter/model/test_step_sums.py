"""Every number of a step has a name and one position, and all of them are one tensor."""

import torch

from services.drafter.model.step_sums import StepSums


def test_the_names_are_views_that_cover_the_tensor_once() -> None:
    sums = StepSums(torch.zeros(StepSums.size(block_size=4)))
    views = sums.loss, sums.weight, sums.accepted, sums.correct, sums.labels, sums.stop
    for number, view in enumerate(views):
        view.add_(number + 1.0)
    assert sums.values.tolist() == [1.0, 2.0, 3.0, 4.0, 4.0, 4.0, 5.0, 5.0, 5.0, 6.0]
    assert StepSums.size(1) == 4 and len(StepSums(torch.zeros(4)).labels) == 0


def test_sums_of_a_batch_stop_no_rank() -> None:
    loss, weight, accepted, correct, labels = (
        torch.tensor(7.0),
        torch.tensor(2.0),
        torch.tensor(3.0),
        torch.ones(2),
        torch.ones(2) * 8,
    )
    sums = StepSums.of(loss, weight, accepted, correct, labels)
    assert torch.stack([sums.loss, sums.weight, sums.accepted, sums.stop]).tolist() == [7.0, 2.0, 3.0, 0.0]
    assert (sums.correct.tolist(), sums.labels.tolist()) == ([1.0, 1.0], [8.0, 8.0])
