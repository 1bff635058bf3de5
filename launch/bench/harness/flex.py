"""What torch offers for the drafter's attention, to measure our kernels against: flex_attention over the tiles in sight.

Shapes: T context rows, Q block rows, M query rows among them, S keys, Hq query heads, Hkv key and value heads, D head_dim.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from common.device.upload import upload
from services.drafter.model.attention import KeysValues
from services.drafter.model.visibility import TILE, Bools, Ints, KeyRuns, in_one_sequence


class Tiles(NamedTuple):
    """Of each tile of queries and keys: is part of it visible, is all of it."""

    partly: Bools  # [ceil(M / TILE), S / TILE]
    wholly: Bools


_flex_attention = torch.compile(flex_attention, dynamic=False)


class FlexAttention:
    """See `services.drafter.model.attention.Attend`.

    Compiled once: the context is padded to its capacity, queries to whole tiles. The option ROWS_GUARANTEED_SAFE gives
    NaN here, since a row may see nothing of the first tile that it visits.
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
        output = _flex_attention(query[None], key[None], value[None], block_mask=self.block_mask, enable_gqa=grouped)
        rows: Tensor = output[0, :, :num_queries].transpose(0, 1).flatten(1)
        return rows


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


def find_tiles(runs: KeyRuns, num_keys: int) -> Tiles:
    """Which tiles runs in one sequence of S keys touch and which they fill, without looking at single keys.

    Args:
        runs: M rows, a multiple of TILE.
        num_keys: S, a multiple of TILE.
    """
    start, end = np.concatenate([runs.start, runs.own_start]), np.concatenate([runs.end, runs.own_end])
    tile_row = np.tile(np.arange(len(runs.start)) // TILE, 2)
    shape = (len(runs.start) // TILE, num_keys // TILE)
    touched = _count(tile_row, start // TILE, np.where(end > start, -(-end // TILE), 0), shape) > 0
    filled = _count(tile_row, -(-start // TILE), end // TILE, shape) == TILE
    return Tiles(touched & ~filled, filled)


def _count(tile_row: Ints, first: Ints, last: Ints, shape: tuple[int, int]) -> Ints:
    """How many runs cover each tile of their row from `first` to before `last`."""
    some = last > first
    width = shape[1] + 1
    opened, closed = (
        np.bincount(tile_row[some] * width + column[some], minlength=shape[0] * width) for column in (first, last)
    )
    return (opened - closed).reshape(shape[0], width).cumsum(1)[:, :-1]
