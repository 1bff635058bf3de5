"""Attention of block rows over the context and themselves: dense, or on a GPU over the visible tiles only.

Shapes: T context rows, Q block rows, M query rows among them, Hq query heads, Hkv key and value heads, D head_dim.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from common.device.upload import upload
from common.draft_config import DraftConfig
from services.drafter.kernels.key_runs import KeyRuns

_KERNEL_HEAD_DIMS = (16, 32, 64, 128, 256)
KeysValues = tuple[Tensor, Tensor]  # key, normed and rotated, and value: both [Hkv, rows, D]


class Attend(Protocol):
    """Attention of M query rows under one visibility."""

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        """Attend with grouped heads scaled by 1 / sqrt(D): [Hq, M, D], [Hkv, T or Q, D] each -> [M, Hq * D]."""


class DenseAttention:
    """Attention under a mask of all rows and keys: the reference, and the only choice on a CPU."""

    def __init__(self, runs: KeyRuns, num_context: int, num_rows: int, device: torch.device) -> None:
        start, end, own_start, own_end = (upload(edge, device)[:, None] for edge in runs)
        keys = torch.arange(num_context + num_rows, device=device)[None, :]  # the context, then the block rows
        own_keys = keys - num_context
        self.mask = ((keys >= start) & (keys < end)) | ((own_keys >= own_start) & (own_keys < own_end))  # [M, T + Q]

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        key, value = (_join(pair) for pair in zip(context, own, strict=True))
        grouped = query.shape[0] != key.shape[0]
        output = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=self.mask, enable_gqa=grouped)
        return output[0].transpose(0, 1).flatten(1)


def make_attention(runs: KeyRuns, num_context: int, num_rows: int, draft: DraftConfig, device: torch.device) -> Attend:
    """Return the attention of the query rows over T + Q keys: kernels for bfloat16 on a GPU, else dense."""
    if device.type == "cuda" and draft.dtype == "bfloat16" and draft.head_dim in _KERNEL_HEAD_DIMS:
        from services.drafter.kernels.swept_attention import SweptAttention  # triton comes with torch for GPUs only

        return SweptAttention(runs, num_context, num_rows, device)
    return DenseAttention(runs, num_context, num_rows, device)


def _join(heads: Sequence[Tensor]) -> Tensor:
    """Concatenate [heads, rows, D] along the rows, stored row by row as projections leave them."""
    return torch.cat([part.transpose(0, 1) for part in heads]).transpose(0, 1)
