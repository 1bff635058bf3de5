"""The rows of a batch: right-padded for the target, packed back to back for the drafter.

B rows, S padded length, T real tokens of all rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from common.dataset import Dataset
from common.ring import Rows


class TargetRows(NamedTuple):
    """A batch as the target runs it and as the drafter receives it."""

    input_ids: torch.Tensor  # int64 [B, S] on the CPU, right-padded with 0
    lengths: list[int]  # [B]
    packed: Rows


def read_rows(dataset: Dataset, sample_ids: Sequence[int]) -> TargetRows:
    """Read the samples, one row each in the given order, padded to the longest.

    Raises:
        DataError: a file of the data set is damaged.
    """
    samples = [dataset.read(sample_id) for sample_id in sample_ids]
    lengths = [len(sample.input_ids) for sample in samples]
    padded = np.zeros((len(samples), max(lengths)), np.int64)
    for row, sample in zip(padded, samples, strict=True):
        row[: len(sample.input_ids)] = sample.input_ids
    packed = Rows(
        input_ids=np.concatenate([sample.input_ids for sample in samples]),
        loss_mask=np.concatenate([sample.loss_mask for sample in samples]).astype(np.uint8),
        position_ids=np.concatenate([np.arange(length, dtype=np.int32) for length in lengths]),
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        sample_ids=np.array(sample_ids, np.int64),
    )
    return TargetRows(torch.from_numpy(padded), lengths, packed)
