"""Metrics of a step arrive at the host one step later, and once."""

import torch

from common.device.stopwatch import Stopwatch
from services.drafter.model.step_sums import StepSums
from services.drafter.training.optimizer import StepResult
from services.drafter.training.quarantine import BatchFacts, QuarantinedBatch
from services.drafter.training.step_metrics import MetricsReadback, StepCost, StepMetrics


def make_result(loss: float, *, found_inf: float = 0.0, stop: float = 0.0) -> StepResult:
    """Return a step of blocks of three: loss, weight, selector's loss, three kinds of accepted slots, three counts per slot."""
    sums = torch.tensor([loss * 2, 2.0, 1.0, 5.0, 4.0, 6.0, 3.0, 1.0, 7.0, 2.0, 8.0, 4.0, stop])
    return StepResult(torch.tensor(loss), torch.tensor(0.5), torch.tensor(found_inf), StepSums(sums), torch.tensor(1.0))


def make_facts(batch: int, *, nonfinite: float = 0.0) -> BatchFacts:
    return BatchFacts(batch, [7, 8], torch.tensor([nonfinite, 2.5, 12.0, 4.0]))


def make_record(batch: int, *, nonfinite: int = 0) -> QuarantinedBatch:
    return QuarantinedBatch(batch=batch, sample_ids=[7, 8], num_nonfinite=nonfinite, largest_finite=2.5, loss=3.0)


COST = StepCost(num_tokens=30, flops=2e12)


def timed() -> Stopwatch:
    watch = Stopwatch(torch.device("cpu"))
    watch.lap("forward_backward_s")
    watch.lap("optimizer_s")
    return watch


def test_metrics_of_a_step_arrive_with_the_next_step() -> None:
    readback = MetricsReadback(torch.device("cpu"), num_sums=13, num_batches=2, with_selector=False)
    assert readback.flush() is None
    watches = [timed(), timed()]
    assert readback.push(1, make_result(4.0), watches[0], COST, [make_facts(5), make_facts(6, nonfinite=3.0)]) is None
    first = StepMetrics(
        step=1,
        loss=4.0,
        grad_norm=0.5,
        skipped=False,
        stop_requested=False,
        num_labels=[8, 4],
        num_correct=[3, 1],
        num_accepted=5,
        selector=None,
        num_skipped=0,
        laps_s=watches[0].laps_s(),
        cost=COST,
        batches=[make_record(5), make_record(6, nonfinite=3)],
    )
    assert readback.push(2, make_result(2.0, found_inf=1.0, stop=1.0), watches[1], COST, [make_facts(9)]) == first
    second = first._replace(step=2, loss=2.0, skipped=True, stop_requested=True, laps_s=watches[1].laps_s())
    assert readback.flush() == second._replace(num_skipped=1, batches=[make_record(9)])
    assert list(second.laps_s) == ["forward_backward_s", "optimizer_s"]
    assert all(lap >= 0 for lap in second.laps_s.values())
    assert readback.flush() is None


def test_metrics_are_copied_when_they_are_pushed() -> None:
    readback = MetricsReadback(torch.device("cpu"), num_sums=13, num_batches=1, with_selector=True)
    result, facts = make_result(4.0), make_facts(5)
    readback.push(1, result, timed(), COST, [facts])
    for tensor in (result.loss, result.grad_norm, result.sums.values, facts.facts):
        tensor.zero_()
    figures = readback.flush()
    assert figures is not None
    assert (figures.loss, figures.grad_norm, figures.num_labels) == (4.0, 0.5, [8, 4])
    assert figures.batches == [make_record(5)]
    row = figures.row()
    assert (row["block_acceptance"], row["block_acceptance_unary"], row["block_acceptance_oracle"]) == (1.625, 1.5, 1.75)
    assert (row["selector_loss"], row["recall_per_slot"]) == (0.5, [0.875, 0.5])
