"""Model and optimizer, and rehearsals: steps of made-up batches that do not change them, to time, compile and fill memory.

Shapes: D documents, T = D * length rows, K taps, H hidden.
"""

import math
from typing import NamedTuple

import numpy as np
import torch

from common.config import Config
from services.drafter.model.anchors import choose_blocks
from services.drafter.model.batch import PackedBatch
from services.drafter.model.loss import Head
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_loss
from services.drafter.training.optimizer import MasterAdamW


class TrainingState(NamedTuple):
    """Model, frozen weights and optimizer: everything a training step reads or changes."""

    model: DraftModel
    frozen: tuple[torch.Tensor, Head]  # the target's embedding, and its head in the form that the loss uses
    optimizer: MasterAdamW

    @property
    def device(self) -> torch.device:
        return self.frozen[0].device

    def rehearse_batch(self, batch: PackedBatch, config: Config, epoch: int = 0) -> None:
        """Run forward and backward; `rehearse_step` must follow."""
        sums = block_loss(self.model, *self.frozen, batch, choose_blocks(batch, epoch, config), config)
        self.optimizer.gradients.accumulate(sums)

    def rehearse_step(self) -> None:
        """Step the optimizer with a NaN loss, which changes no weight or state and empties the gradients."""
        self.optimizer.gradients.sums.loss.fill_(math.nan)
        self.optimizer.step(0)


def make_up_batch(num_documents: int, length: int, config: Config, device: torch.device) -> PackedBatch:
    """Make documents of one length, all supervised, with random tokens and hidden states [T, K, H].

    Values are random like those of a run: a GPU computes faster with constant values, so a measurement would promise too
    much. The generators are private, so that a rehearsal does not change the random numbers of a run.
    """
    num_tokens, shape = num_documents * length, (len(config.draft.tap_layers), config.shape.hidden_size)
    hidden_states = torch.empty((num_tokens, *shape), dtype=getattr(torch, config.ring.dtype), device=device)
    return PackedBatch(
        hidden_states=hidden_states.normal_(generator=torch.Generator(device).manual_seed(0)),
        position_ids=torch.arange(length, device=device).repeat(num_documents),
        input_ids=np.random.default_rng(0).integers(0, config.shape.vocab_size, num_tokens),
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        cu_seqlens=np.arange(num_documents + 1) * length,
        sample_ids=np.arange(num_documents),
    )


def full_shape(config: Config) -> tuple[int, int]:
    """Return number and length of documents of the bucket that fills a batch best; prefer the middle bucket."""
    plan, middle = config.plan, len(config.plan.bucket_lengths) // 2
    outwards = sorted(range(len(plan.bucket_lengths)), key=lambda bucket: abs(bucket - middle))
    lengths = [plan.bucket_lengths[bucket] for bucket in outwards]
    shapes = [(min(plan.max_tokens_per_batch // length, plan.max_samples_per_batch), length) for length in lengths]
    return max(shapes, key=math.prod)
