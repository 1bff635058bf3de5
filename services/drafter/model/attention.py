"""Attention of block rows over the context and themselves: dense, or on a GPU over the visible tiles only.

Shapes: T context rows, Q block rows, M query rows among them, S keys, Hq query heads, Hkv key and value heads, D head_dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import DraftConfig
from common.device.upload import upload
from services.drafter.model.visibility import KeyRuns, in_one_sequence

_KERNEL_HEAD_DIMS = (16, 32, 64, 128, 256)
KeysValues = tuple[Tensor, Tensor]  # key, normed and rotated, and value: both [Hkv, rows, D]


class Attend(Protocol):
    """Attention of M query rows under one visibility."""

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        """Attend with grouped key and value heads, scaled by 1 / sqrt(D).

        Args:
            query: [Hq, M, D].
            context: [Hkv, T, D] each.
            own: [Hkv, Q, D] each.

        Returns:
            [M, Hq * D].
        """


def visible(runs: KeyRuns, num_keys: int, device: torch.device) -> Tensor:
    """Return the mask of S keys in one sequence for each query row: bool [M, S]."""
    start, end, own_start, own_end = (upload(part, device)[:, None] for part in runs)
    keys = torch.arange(num_keys, device=device)[None, :]
    return ((keys >= start) & (keys < end)) | ((keys >= own_start) & (keys < own_end))


class DenseAttention:
    """Attention under a mask of all rows and keys: the reference, and the only choice on a CPU."""

    def __init__(self, runs: KeyRuns, num_context: int, num_rows: int, device: torch.device) -> None:
        self.mask = visible(in_one_sequence(runs, num_context), num_context + num_rows, device)

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        key, value = (_join(both) for both in zip(context, own, strict=True))
        grouped = query.shape[0] != key.shape[0]
        output = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=self.mask, enable_gqa=grouped)
        return output[0].transpose(0, 1).flatten(1)


def make_attention(runs: KeyRuns, num_context: int, num_rows: int, draft: DraftConfig, device: torch.device) -> Attend:
    """Return the attention of M query rows: kernels on a GPU, else dense.

    Args:
        runs: of the query rows.
        num_context: T.
        num_rows: Q.
        draft: D and the type of the weights; the kernels are for bfloat16.
        device: the device that computes it.
    """
    if device.type == "cuda" and draft.dtype == "bfloat16" and draft.head_dim in _KERNEL_HEAD_DIMS:
        from services.drafter.kernels.swept_attention import SweptAttention  # triton comes with torch for GPUs only

        return SweptAttention(runs, num_context, num_rows, device)
    return DenseAttention(runs, num_context, num_rows, device)


def _join(heads: Sequence[Tensor]) -> Tensor:
    """Concatenate [heads, rows, D] along the rows, stored row by row as projections leave them."""
    return torch.cat([part.transpose(0, 1) for part in heads]).transpose(0, 1)
