"""Attention of block rows over the context and themselves: dense, or on a GPU only the tiles that are seen.

Shapes: T context rows, Q block rows, M query rows among them, S keys, Hq query heads, Hkv key and value heads, D head_dim.
"""

import functools
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from services.drafter.upload import upload
from services.drafter.visibility import TILE, KeyRuns, find_tiles, in_one_sequence

_MIN_TILED_HEAD_DIM = 16  # of flex_attention
KeysValues = tuple[Tensor, Tensor]  # key, normed and rotated, and value: both [Hkv, rows, D]


class Attend(Protocol):
    """Attention of M query rows under one visibility."""

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        """Grouped key and value heads, scaled by 1 / sqrt(D).

        Args:
            query: [Hq, M, D].
            context: [Hkv, T, D] each.
            own: [Hkv, Q, D] each.

        Returns:
            [M, Hq * D].
        """


class DenseAttention:
    """Under a mask of all rows and keys: the reference, and the way of the CPU."""

    def __init__(self, runs: KeyRuns, num_context: int, num_rows: int, device: torch.device) -> None:
        start, end, own_start, own_end = (upload(part, device)[:, None] for part in in_one_sequence(runs, num_context))
        keys = torch.arange(num_context + num_rows, device=device)[None, :]
        self.mask = ((keys >= start) & (keys < end)) | ((keys >= own_start) & (keys < own_end))  # [M, S]

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        """See `Attend`."""
        key, value = (_join(both) for both in zip(context, own, strict=True))
        grouped = query.shape[0] != key.shape[0]
        output = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=self.mask, enable_gqa=grouped)
        return output[0].transpose(0, 1).flatten(1)


class TiledAttention:
    """flex_attention over the tiles in sight; compiled on a GPU.

    All shapes are constant in a run, so it is compiled once: the context is padded to its capacity, queries to whole
    tiles. The runs say exactly which keys count, so a mask looks up four numbers per row and can reach no row that
    does not exist. Of eleven other kernel settings timed on an H200 none was faster on a packed batch; all of them had the
    option ROWS_GUARANTEED_SAFE, which gives NaN here, since a row may see nothing of the first tile that it visits.
    """

    def __init__(self, runs: KeyRuns, capacity: int, num_rows: int, device: torch.device) -> None:
        self._capacity = -(-capacity // TILE) * TILE
        self._padding = -len(runs.start) % TILE, -num_rows % TILE  # of queries and of block rows
        runs = _pad(in_one_sequence(runs, self._capacity), self._padding[0])
        num_keys = self._capacity + num_rows + self._padding[1]
        self.block_mask = _block_mask(runs, num_keys, device)

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        """See `Attend`."""
        num_queries, missing = query.shape[1], self._capacity - context[0].shape[1]
        key, value = (
            _join([_pad_rows(seen, missing), _pad_rows(rows, self._padding[1])])
            for seen, rows in zip(context, own, strict=True)
        )
        query = _pad_rows(query, self._padding[0])
        grouped = query.shape[0] != key.shape[0]
        output = _flex_attention(query.is_cuda)(
            query[None], key[None], value[None], block_mask=self.block_mask, enable_gqa=grouped
        )
        rows: Tensor = output[0, :, :num_queries].transpose(0, 1).flatten(1)
        return rows


def make_attention(
    runs: KeyRuns, num_context: int, capacity: int, num_rows: int, head_dim: int, device: torch.device
) -> Attend:
    """The attention of M query rows for what `device` is.

    Args:
        runs: of the query rows.
        num_context: T.
        capacity: the largest T of the run.
        num_rows: Q.
        head_dim: D.
        device: where it will be computed.
    """
    if device.type == "cuda" and head_dim >= _MIN_TILED_HEAD_DIM:
        return TiledAttention(runs, capacity, num_rows, device)
    return DenseAttention(runs, num_context, num_rows, device)


@functools.cache
def _flex_attention(compiled: bool) -> Any:
    return torch.compile(flex_attention, dynamic=False) if compiled else flex_attention


def _join(heads: Sequence[Tensor]) -> Tensor:
    """[heads, rows, D] along the rows, in the order in memory that projections leave: row by row."""
    return torch.cat([part.transpose(0, 1) for part in heads]).transpose(0, 1)


def _pad_rows(heads: Tensor, num_rows: int) -> Tensor:
    """More rows of zeros; `F.pad` would copy even where there are none."""
    return F.pad(heads.transpose(0, 1), (0, 0, 0, 0, 0, num_rows)).transpose(0, 1) if num_rows else heads


def _pad(runs: KeyRuns, num_rows: int) -> KeyRuns:
    """More rows, each of which sees key 0: one that sees nothing would be NaN."""
    return KeyRuns(*(np.pad(part, (0, num_rows), constant_values=end) for part, end in zip(runs, (0, 1, 0, 0), strict=True)))


def _block_mask(runs: KeyRuns, num_keys: int, device: torch.device) -> BlockMask:
    partly, wholly = find_tiles(runs, num_keys)
    by_row, by_column = (
        _ordered(partly, device) + _ordered(wholly, device),
        _ordered(partly.T, device) + _ordered(wholly.T, device),
    )
    start, end, own_start, own_end = (upload(part.astype(np.int32), device) for part in runs)

    def is_seen(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return ((key >= start[row]) & (key < end[row])) | ((key >= own_start[row]) & (key < own_end[row]))

    return BlockMask((len(runs.start), num_keys), *by_row, *by_column, (TILE, TILE), is_seen)


def _ordered(seen: NDArray[np.bool_], device: torch.device) -> tuple[Tensor, Tensor]:
    """How many tiles each row has, and their columns, first those it has: [1, 1, rows] and [1, 1, rows, columns]."""
    columns = np.argsort(~seen, axis=1, kind="stable").astype(np.int32)
    return upload(seen.sum(1, dtype=np.int32)[None, None], device), upload(columns[None, None], device)
