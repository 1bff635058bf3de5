"""Where randomness comes from: the seed, the epoch and the sample, never a rank, the time or a step counter."""

from typing import Literal

import numpy as np

PURPOSES = {"anchors": 0, "noise": 1}


def sample_sequence(seed: int, epoch: int, sample_id: int, purpose: Literal["anchors", "noise"]) -> np.random.SeedSequence:
    """The seed of one sample's draws in one epoch; independent for each purpose."""
    return np.random.SeedSequence((seed, epoch, sample_id), spawn_key=(PURPOSES[purpose],))
