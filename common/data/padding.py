"""Lengths of the padded rows of a batch: few different ones, so that shapes repeat."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_SHORTEST_STEP = 8  # tokens
_STEPS_PER_OCTAVE = 64


def padded_lengths(longest: NDArray[np.integer], bucket_lengths: Sequence[int]) -> NDArray[np.int64]:
    """Round up the longest row of each batch, never beyond the bound of its bucket.

    Up to 1,024 tokens to a multiple of 8, beyond that in 64 steps from one power of two to the next: at most 1.6 % of a long
    row, half a percent on average.

    Args:
        longest: tokens of the longest row, any shape.
        bucket_lengths: upper bounds of the buckets, ascending; the last is at least as long as every row.
    """
    bounds = np.asarray(bucket_lengths)[np.searchsorted(bucket_lengths, longest)]
    octave = 2 ** np.ceil(np.log2(longest)).astype(np.int64)
    step = np.maximum(_SHORTEST_STEP, octave // (2 * _STEPS_PER_OCTAVE))
    lengths: NDArray[np.int64] = np.minimum(-(-longest // step) * step, bounds).astype(np.int64)
    return lengths
