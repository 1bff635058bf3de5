"""The figures of a step on their way to the host, one step behind, so that no step waits for them.

All ranks read the same reduced figures of the same step, so what is decided by them is unanimous.
"""

from typing import NamedTuple

import torch

from common.copy_stream import CopyStream, Mark, mark_computation
from common.stopwatch import Stopwatch
from services.drafter.optimizer import StepResult
from services.drafter.quarantine import NUM_FACTS, BatchFacts, QuarantinedBatch


class StepFigures(NamedTuple):
    """One optimizer step as the host sees it."""

    step: int  # optimizer steps done, this one included
    loss: float
    grad_norm: float
    skipped: bool  # the loss or a gradient was not finite; the weights are as before
    stop_requested: bool  # by any rank
    num_labels: list[int]  # per slot 1 .. B - 1
    num_correct: list[int]
    num_accepted: int  # leading correct slots of all blocks
    num_skipped: int  # steps of the run so far, this one included, that left the weights as they were
    laps_s: dict[str, float]  # where this rank's time went
    cost: "StepCost"
    batches: list[QuarantinedBatch]  # of this rank alone


class StepCost(NamedTuple):
    """What one rank computed in a step."""

    num_tokens: int
    flops: float


class Journal:
    """Holds the figures of the last step until the next one is under way."""

    def __init__(self, device: torch.device, num_sums: int, num_batches: int) -> None:
        self._copies = CopyStream(device)
        self._num_reduced = 4 + num_sums
        num_figures = self._num_reduced + NUM_FACTS * num_batches
        self._host = torch.empty(num_figures, pin_memory=device.type == "cuda")
        self._figures = torch.empty(num_figures, device=device)
        self._pending: tuple[int, Mark, Stopwatch, StepCost, list[BatchFacts]] | None = None
        self._device = device

    def push(
        self, step: int, result: StepResult, watch: Stopwatch, cost: StepCost, batches: list[BatchFacts]
    ) -> StepFigures | None:
        """Send off the figures of step number `step`; returns those of the step before, if not yet read."""
        earlier = self.flush()
        scalars = torch.stack([result.loss, result.grad_norm, result.found_inf, result.num_counted])
        figures = torch.cat([scalars, result.sums, *(batch.facts for batch in batches)])
        self._figures[: len(figures)] = figures
        with self._copies.after(mark_computation(self._device)):
            self._host.copy_(self._figures, non_blocking=True)
        self._pending = (step, self._copies.mark(), watch, cost, batches)
        return earlier

    def flush(self) -> StepFigures | None:
        """The figures still on their way, waited for; None where there are none."""
        if self._pending is None:
            return None
        step, copied, watch, cost, batches = self._pending
        self._pending = None
        copied.wait()
        loss, grad_norm, skipped, counted, _, _, accepted, *counts, stop = self._host[: self._num_reduced].tolist()
        facts = self._host[self._num_reduced :].view(-1, NUM_FACTS).tolist()
        correct, labels = counts[: len(counts) // 2], counts[len(counts) // 2 :]
        return StepFigures(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            skipped=skipped > 0,
            stop_requested=stop > 0,
            num_labels=[round(n) for n in labels],
            num_correct=[round(n) for n in correct],
            num_accepted=round(accepted),
            num_skipped=step - round(counted),
            laps_s=watch.laps_s(),
            cost=cost,
            batches=[QuarantinedBatch.of(batch, values) for batch, values in zip(batches, facts, strict=False)],
        )
