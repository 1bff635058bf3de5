"""Noise on the target's features while training, as in vllm-project/speculators."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from common.config import Config
from services.drafter.model.seeding import sample_sequence


def add_noise(
    hidden_states: Tensor, cu_seqlens: NDArray[np.int64], sample_ids: NDArray[np.int64], epoch: int, config: Config
) -> Tensor:
    """Add uniform noise in +-train.noise_scale, or gaussian noise of that deviation; never to evaluation batches.

    A document's noise depends on (seed, epoch, sample id) and its length only, and on the kind of device.

    Args:
        hidden_states: [T, K, H], left as it is.
        cu_seqlens: int64 [D + 1] on the CPU.
        sample_ids: int64 [D] on the CPU.
        epoch: number of the pass over the data.
        config: the seed, train.noise and train.noise_scale.

    Returns:
        [T, K, H]; `hidden_states` itself when train.noise is "off".
    """
    scale = config.train.noise_scale
    if config.train.noise == "off":
        return hidden_states
    noise = torch.empty_like(hidden_states)
    for document, sample_id in enumerate(sample_ids):
        sequence = sample_sequence(config.seed, epoch, int(sample_id), "noise")
        generator = torch.Generator(hidden_states.device).manual_seed(int(sequence.generate_state(1, np.uint64)[0] >> 1))
        rows = noise[int(cu_seqlens[document]) : int(cu_seqlens[document + 1])]
        if config.train.noise == "uniform":
            rows.uniform_(-scale, scale, generator=generator)
        else:
            rows.normal_(0.0, scale, generator=generator)
    return noise.add_(hidden_states)
