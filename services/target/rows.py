"""The rows of a batch: right-padded for the target, packed back to back for the drafter.

B rows, S padded length, T real tokens of all rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.data.dataset import Dataset
from common.data.held_out import HeldOut
from common.data.padding import padded_lengths
from common.ring.ring import Rows


class TargetRows(NamedTuple):
    """A batch in the form that the target runs and in the form that the drafter receives."""

    input_ids: torch.Tensor  # int64 [B, S] on the CPU, right-padded with 0
    token_index: NDArray[np.int32]  # [T], of each real token in B * S
    packed: Rows


def read_rows(dataset: Dataset | HeldOut, sample_ids: Sequence[int], bucket_lengths: Sequence[int]) -> TargetRows:
    """Read the samples, one row each in the given order, as long as `common.data.padding` says.

    Raises:
        DataError: a file of the data set is damaged.
    """
    samples = [dataset.read(sample_id) for sample_id in sample_ids]
    masks = [sample.loss_mask for sample in samples]
    length = int(padded_lengths(np.array(max(len(mask) for mask in masks)), bucket_lengths))
    return make_rows([sample.input_ids for sample in samples], masks, sample_ids, length)


def make_rows(
    tokens: Sequence[NDArray[np.integer]], masks: Sequence[NDArray[np.generic]], sample_ids: Sequence[int], padded_length: int
) -> TargetRows:
    """Make the rows of documents from tokens and loss mask of each, no longer than `padded_length`."""
    lengths = [len(row) for row in tokens]
    padded = np.zeros((len(tokens), padded_length), np.int64)
    for target, row in zip(padded, tokens, strict=True):
        target[: len(row)] = row
    position_ids = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    packed = Rows(
        input_ids=np.concatenate(tokens),
        loss_mask=np.concatenate(masks).astype(np.uint8),
        position_ids=position_ids,
        cu_seqlens=np.cumsum([0, *lengths], dtype=np.int32),
        sample_ids=np.array(sample_ids, np.int64),
    )
    starts = np.repeat(np.arange(len(lengths)) * padded_length, lengths)
    return TargetRows(torch.from_numpy(padded), (position_ids + starts).astype(np.int32), packed)
