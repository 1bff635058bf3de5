"""Noise on the target's features while training, as in vllm-project/speculators."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch

from common.config import Config
from services.drafter.model.batch import PackedBatch
from services.drafter.model.seeding import sample_sequence


def add_noise(batch: PackedBatch, epoch: int, config: Config) -> PackedBatch:
    """Add uniform noise in +-train.noise_scale to the hidden states, or gaussian noise of that deviation; never to evaluation.

    A document's noise depends on (seed, epoch, sample id) and its length only, and on the kind of device. The given hidden
    states stay as they are.
    """
    scale, hidden_states = config.train.noise_scale, batch.hidden_states
    if config.train.noise == "off":
        return batch
    noise = torch.empty_like(hidden_states)
    for sample_id, (start, end) in zip(batch.sample_ids, pairwise(batch.cu_seqlens.tolist()), strict=True):
        sequence = sample_sequence(config.seed, epoch, int(sample_id), "noise")
        generator = torch.Generator(hidden_states.device).manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
        if config.train.noise == "uniform":
            noise[start:end].uniform_(-scale, scale, generator=generator)
        else:
            noise[start:end].normal_(0.0, scale, generator=generator)
    return replace(batch, hidden_states=noise.add_(hidden_states))
