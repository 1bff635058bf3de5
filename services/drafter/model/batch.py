"""A packed batch of documents, as every part of the drafter takes it.

Shapes: T packed rows, D documents, K taps, H hidden.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """D documents back to back without padding: the device computes on tensors, the CPU plans with arrays."""

    hidden_states: Tensor  # [T, K, H] on the device
    position_ids: Tensor  # int64 [T] on the device, from 0 in every document
    input_ids: Ints  # [T]
    loss_mask: Bools  # [T]
    cu_seqlens: Ints  # [D + 1], the first row of each document, then T
    sample_ids: Ints  # [D]
