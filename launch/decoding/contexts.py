"""Keys and values of contexts that grow, one per row, each with room for the block that continues it.

Shapes: R rows, N new context or block rows of all of them, B block size, C columns, Hkv key and value heads, D head_dim.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import DraftConfig
from common.device.upload import upload
from services.drafter.model.attention import KeysValues

_STEP = 256  # columns by which the room grows


class Places(NamedTuple):
    """Where N rows come: some behind each context, one context after the other."""

    counts: Sequence[int]  # [R]
    rows: Tensor  # int64 [N]
    columns: Tensor  # int64 [N], the positions as well

    def fill(self, layer: KeysValues, new: KeysValues) -> None:
        """Write [Hkv, N, D] each into a layer's [R, Hkv, C, D] each."""
        for heads, part in zip(layer, new, strict=True):
            heads[self.rows, :, self.columns] = part.transpose(0, 1)


class Contexts:
    """Each from column 0 on, then its last block, then zeros: attention makes NaN of a NaN that a mask hides.

    Attributes:
        lengths: int64 [R], of the contexts.
    """

    def __init__(self, config: DraftConfig, num_rows: int, weight: Tensor) -> None:
        """Empty contexts of the type, and on the device, of a weight."""
        self.lengths = np.zeros(num_rows, dtype=np.int64)
        self._block_size, self._device = config.block_size, weight.device
        empty = weight.new_zeros(num_rows, config.num_key_value_heads, 0, config.head_dim)
        self._layers: list[KeysValues] = [(empty, empty)] * config.num_layers
        self._make_room()

    def places(self, counts: Sequence[int]) -> Places:
        """Those right behind each context."""
        rows = np.repeat(np.arange(len(counts)), counts)
        columns = [np.arange(length, length + count) for length, count in zip(self.lengths, counts, strict=True)]
        return Places(counts, *upload(np.stack([rows, np.concatenate(columns)]), self._device).unbind())

    def append(self, places: Places, new: Iterable[KeysValues]) -> None:
        """Make the contexts longer by keys and values [Hkv, N, D] of every layer."""
        self.lengths = self.lengths + places.counts
        self._make_room()
        for layer, pair in zip(self._layers, new, strict=True):
            places.fill(layer, pair)

    def select(self, rows: Sequence[int]) -> None:
        """Go on with these rows only."""
        if list(rows) == list(range(len(self.lengths))):
            return
        self.lengths = self.lengths[list(rows)]
        index = torch.tensor(rows, device=self._device)
        self._layers = [(key.index_select(0, index), value.index_select(0, index)) for key, value in self._layers]

    def layers(self) -> list[KeysValues]:
        """Of every layer [R, Hkv, C, D] each, C the longest context and a block; not copies."""
        num_columns = self._num_columns()
        return [(key[:, :, :num_columns], value[:, :, :num_columns]) for key, value in self._layers]

    def _num_columns(self) -> int:
        return int(self.lengths.max()) + self._block_size

    def _make_room(self) -> None:
        missing = self._num_columns() - self._layers[0][0].shape[2]
        if missing > 0:
            room = 0, 0, 0, -(-missing // _STEP) * _STEP
            self._layers = [(F.pad(key, room), F.pad(value, room)) for key, value in self._layers]
