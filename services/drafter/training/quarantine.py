"""Records of skipped steps: `<run>/quarantine/step-00000012-rank0.json`.

The host learns one step late that a step was not finite, when its tensors are overwritten. So the facts of every batch
are collected on the device and copied to the host with the metrics of the step.
"""

import logging
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from common.run_dir import QUARANTINE, write_json
from services.drafter.kernels.fused import fused
from services.drafter.model.step_sums import StepSums

NUM_FACTS = 4
log = logging.getLogger(__name__)


class BatchFacts(NamedTuple):
    """A batch in training; the facts are on the device."""

    batch: int
    sample_ids: list[int]
    facts: Tensor  # float32 [4]: hidden values that are not finite, the largest finite magnitude, loss sum, its divisor


class QuarantinedBatch(msgspec.Struct):
    """Facts of a batch, on the host."""

    batch: int
    sample_ids: list[int]
    num_nonfinite: int  # of the hidden states as received; from 2**24 on a rounded number
    largest_finite: float
    loss: float

    @classmethod
    def of(cls, facts: BatchFacts, values: list[float]) -> "QuarantinedBatch":
        """Make a record of the values [4] of the facts."""
        num_nonfinite, largest, loss, divisor = values
        return cls(facts.batch, facts.sample_ids, round(num_nonfinite), largest, loss / divisor if divisor else loss)


def collect_facts(batch: int, sample_ids: list[int], hidden_states: Tensor, sums: StepSums) -> BatchFacts:
    """Collect the facts of one batch without waiting for the device; hidden states may have any shape."""
    return BatchFacts(batch, sample_ids, torch.cat([_inspect(hidden_states), torch.stack([sums.loss, sums.weight]).detach()]))


@fused
def _inspect(hidden_states: Tensor) -> Tensor:
    """Return float32 [2]: the number of values that are not finite, and the largest magnitude of the others."""
    magnitude = hidden_states.float().abs()
    finite = magnitude.isfinite()
    return torch.stack([(~finite).sum().float(), torch.where(finite, magnitude, 0.0).amax()])


def quarantine(run_dir: Path, *, step: int, rank: int, loss: float, grad_norm: float, batches: list[QuarantinedBatch]) -> None:
    """Write the record of a step, of all ranks but for the batches; a disk error is logged and the run goes on."""
    path = run_dir / QUARANTINE / f"step-{step:08}-rank{rank}.json"
    record = {"step": step, "rank": rank, "loss": loss, "grad_norm": grad_norm, "batches": batches}
    try:
        path.parent.mkdir(exist_ok=True)
        write_json(path, record)
        log.warning("step %d was not finite and was skipped: %s", step, path)
    except OSError as error:
        log.error("step %d was not finite; %s: not written: %s", step, path, error.strerror)
