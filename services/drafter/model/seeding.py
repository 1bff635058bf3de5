"""Random sequences that depend on seed, epoch and sample only, never on a rank, the time or a step counter."""

from typing import Literal

import numpy as np

_PURPOSES = {"anchors": 0, "noise": 1}


def sample_sequence(seed: int, epoch: int, sample_id: int, purpose: Literal["anchors", "noise"]) -> np.random.SeedSequence:
    """Return the seed sequence of one sample in one epoch, independent for each purpose."""
    return np.random.SeedSequence((seed, epoch, sample_id), spawn_key=(_PURPOSES[purpose],))
