"""Gradients added up bucket by bucket: the sums that begin, their time and order."""

import pytest
import torch
from torch import Tensor

from services.drafter.model.anchors import choose_blocks
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_loss
from services.drafter.model.step_sums import StepSums
from services.drafter.training.gradients import Gradients
from services.drafter.training.group import GroupBrokenError
from tests.builders.batches import BLOCK_SIZE, frozen_weights, make_batch, make_config

CONFIG = make_config(["sliding_attention", "full_attention", "full_attention"], anchors_per_batch=64)
NUM_SUMS = StepSums.size(BLOCK_SIZE)


def sums_of(model: DraftModel, seed: int) -> StepSums:
    batch = make_batch([9, 12, 5], seed=seed)
    return block_loss(model, *frozen_weights(), batch, choose_blocks(batch, 0, CONFIG), CONFIG)


def reference(seeds: list[int]) -> list[Tensor]:
    """Return the gradients of all batches as autograd adds them up."""
    model = DraftModel(CONFIG)
    for seed in seeds:
        torch.autograd.backward(sums_of(model, seed).loss)
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class Log:
    """Stands in for the group: every value doubles, as with two equal ranks."""

    def __init__(self, model: DraftModel) -> None:
        self.begun: list[Tensor] = []
        self.num_begun_before_the_end = -1  # when the last gradient of the backward pass is not there yet
        model.fc.weight.register_hook(self._note)  # type: ignore[no-untyped-call]

    def _note(self, gradient: Tensor) -> None:
        self.num_begun_before_the_end = len(self.begun)

    def begin(self, values: Tensor) -> None:
        values.mul_(2.0)
        self.begun.append(values)


@pytest.mark.parametrize("bucket_elements", [1, 2000, 6000, 10**9])
def test_every_bucket_is_summed_once_and_all_but_the_first_before_the_backward_pass_ends(bucket_elements: int) -> None:
    model = DraftModel(CONFIG)
    gradients, log = Gradients(list(model.parameters()), NUM_SUMS, bucket_elements), Log(model)
    totals = torch.zeros(NUM_SUMS)
    for seed, begin in ((0, None), (1, None), (2, log.begin)):
        sums = sums_of(model, seed)
        gradients.accumulate(sums, begin)
        totals += sums.values.detach()
        if begin is None:
            assert not log.begun
    gradients.reduce(log.begin)
    buckets = log.begun
    assert log.num_begun_before_the_end == len(buckets) - 1
    assert len(buckets) == {1: 36, 10**9: 1}.get(bucket_elements, len(buckets))
    starts = [bucket.storage_offset() for bucket in buckets]
    assert [start + len(bucket) for start, bucket in zip(starts[1:], buckets[1:], strict=True)] == starts[:-1]
    assert starts[-1] == 0
    assert starts[0] + len(buckets[0]) == gradients.flat.storage_offset() + len(gradients.flat)
    expected = torch.cat([gradient.flatten() for gradient in reference([0, 1, 2])])
    torch.testing.assert_close(gradients.flat, 2.0 * expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(gradients.sums.values, 2.0 * totals)


@pytest.mark.parametrize("seeds", [[], [0], [0, 1]])
def test_a_rank_with_fewer_batches_begins_the_same_sums_in_the_same_order(seeds: list[int]) -> None:
    starts = []
    for share in (seeds, [3, 4]):
        model = DraftModel(CONFIG)
        gradients, log = Gradients(list(model.parameters()), NUM_SUMS, 2000), Log(model)
        gradients.flat.fill_(7.0)  # what a step before left behind
        for index, seed in enumerate(share):
            gradients.accumulate(sums_of(model, seed), log.begin if index == 1 else None)
        gradients.reduce(log.begin)
        starts.append([(bucket.storage_offset(), len(bucket)) for bucket in log.begun])
        if share == []:
            assert not gradients.flat.any()
    assert starts[0] == starts[1]


def test_a_group_that_breaks_in_the_backward_pass_raises_and_the_next_step_is_complete() -> None:
    model = DraftModel(CONFIG)
    gradients, log = Gradients(list(model.parameters()), NUM_SUMS, 2000), Log(model)

    def breaks(values: Tensor) -> None:
        log.begin(values)
        if len(log.begun) == 3:
            raise GroupBrokenError("rank 1 died")

    with pytest.raises(GroupBrokenError, match="rank 1 died"):
        gradients.accumulate(sums_of(model, 0), breaks)
    gradients.abandon()
    log.begun.clear()
    gradients.accumulate(sums_of(model, 1), log.begin)
    gradients.reduce(log.begin)
    expected = torch.cat([gradient.flatten() for gradient in reference([1])])
    torch.testing.assert_close(gradients.flat, 2.0 * expected, rtol=1e-5, atol=1e-5)
