"""Metrics of a training step, copied from the device one step late, so that no step waits for them.

All ranks read the same reduced numbers of a step, so every rank takes the same decision.
"""

from typing import Any, NamedTuple

import torch

from common.device.copy_stream import CopyStream, Mark, mark_computation
from common.device.stopwatch import Stopwatch
from services.drafter.model.step_sums import StepSums
from services.drafter.training.optimizer import StepResult
from services.drafter.training.quarantine import NUM_FACTS, BatchFacts, QuarantinedBatch

_NUM_SCALARS = 4  # of a StepResult, before its sums


class StepCost(NamedTuple):
    """Work of one rank in a step."""

    num_tokens: int
    flops: float


class SelectorSums(NamedTuple):
    """The part of the candidate selector in a step."""

    loss: float  # its cross entropy, divided as the whole loss is
    num_unary: int  # leading slots of all blocks whose likeliest token is the label
    num_oracle: int  # leading slots of all blocks whose candidates hold the label
    num_recalled: list[int]  # labels among the candidates, per slot

    def row(self, num_labels: list[int]) -> dict[str, Any]:
        num_blocks = max(num_labels[0], 1)
        return {
            "selector_loss": self.loss,
            "block_acceptance_unary": 1.0 + self.num_unary / num_blocks,
            "block_acceptance_oracle": 1.0 + self.num_oracle / num_blocks,
            "recall_per_slot": [r / n if n else 0.0 for r, n in zip(self.num_recalled, num_labels, strict=True)],
        }


class StepMetrics(NamedTuple):
    """One optimizer step on the host."""

    step: int  # optimizer steps done, this one included
    loss: float
    grad_norm: float
    skipped: bool  # the loss or a gradient was not finite; the weights did not change
    stop_requested: bool  # by any rank
    num_labels: list[int]  # per slot 1 .. B - 1
    num_correct: list[int]
    num_accepted: int  # leading correct slots of all blocks
    selector: SelectorSums | None  # of DFlash 2
    num_skipped: int  # skipped steps of the run so far, this one included
    laps_s: dict[str, float]  # this rank's time
    cost: StepCost
    batches: list[QuarantinedBatch]  # of this rank only

    def row(self) -> dict[str, Any]:
        """Return the values for the metrics file, without those of the run."""
        num_blocks, step_s = self.num_labels[0], sum(self.laps_s.values())
        return {
            "step": self.step,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "accuracy_per_slot": [c / n if n else 0.0 for c, n in zip(self.num_correct, self.num_labels, strict=True)],
            "block_acceptance": 1.0 + self.num_accepted / num_blocks if num_blocks else 0.0,
            **(self.selector.row(self.num_labels) if self.selector else {}),
            "skipped": self.skipped,
            **self.laps_s,
            "tokens_per_s": self.cost.num_tokens / step_s,
            "tflops": self.cost.flops / step_s * 1e-12,
        }


class MetricsReadback:
    """Holds the metrics of the last step until the next step has been launched."""

    def __init__(self, device: torch.device, num_sums: int, num_batches: int, *, with_selector: bool) -> None:
        self._copies = CopyStream(device)
        self._num_reduced = _NUM_SCALARS + num_sums
        num_values = self._num_reduced + NUM_FACTS * num_batches
        self._host = torch.empty(num_values, pin_memory=device.type == "cuda")
        self._values = torch.empty(num_values, device=device)
        self._pending: tuple[int, Mark, Stopwatch, StepCost, list[BatchFacts]] | None = None
        self._device, self._with_selector = device, with_selector

    def push(
        self, step: int, result: StepResult, watch: Stopwatch, cost: StepCost, batches: list[BatchFacts]
    ) -> StepMetrics | None:
        """Start the copy of step number `step`; returns the metrics of the step before, if not yet read."""
        previous = self.flush()
        scalars = torch.stack([result.loss, result.grad_norm, result.found_inf, result.num_counted])
        values = torch.cat([scalars, result.sums.values, *(batch.facts for batch in batches)])
        self._values[: len(values)] = values
        with self._copies.after(mark_computation(self._device)):
            self._host.copy_(self._values, non_blocking=True)
        self._pending = (step, self._copies.mark(), watch, cost, batches)
        return previous

    def flush(self) -> StepMetrics | None:
        """Wait for the pending copy and return its metrics; None if there is none."""
        if self._pending is None:
            return None
        step, copied, watch, cost, batches = self._pending
        self._pending = None
        copied.wait()
        loss, grad_norm, skipped, counted = self._host[:_NUM_SCALARS].tolist()
        sums = StepSums(self._host[_NUM_SCALARS : self._num_reduced])
        facts = self._host[self._num_reduced :].view(-1, NUM_FACTS).tolist()
        return StepMetrics(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            skipped=skipped > 0,
            stop_requested=float(sums.stop) > 0,
            num_labels=[round(n) for n in sums.labels.tolist()],
            num_correct=[round(n) for n in sums.correct.tolist()],
            num_accepted=round(float(sums.accepted)),
            selector=_selector_sums(sums) if self._with_selector else None,
            num_skipped=step - round(counted),
            laps_s=watch.laps_s(),
            cost=cost,
            batches=[QuarantinedBatch.of(batch, values) for batch, values in zip(batches, facts, strict=False)],
        )


def _selector_sums(sums: StepSums) -> SelectorSums:
    return SelectorSums(
        loss=float(sums.selector_loss) / (float(sums.weight) or 1.0),
        num_unary=round(float(sums.accepted_unary)),
        num_oracle=round(float(sums.accepted_oracle)),
        num_recalled=[round(n) for n in sums.recalled.tolist()],
    )
