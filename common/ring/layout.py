"""The bytes of every tensor in a slot. Target and drafter compute them from the settings; they are never sent.

    slot:  | header, 4 KiB | hidden_states | input_ids | loss_mask | position_ids | cu_seqlens | sample_ids | ... stride

Every tensor starts at a multiple of 256 bytes and has room for the largest batch; a batch of T tokens
and D documents fills the front of each. The stride is a multiple of 2 MiB.

T tokens, K taps, H hidden size, D documents.
"""

import math
import struct
from typing import NamedTuple

import msgspec
import numpy as np

from common.config import Config
from common.errors import SlotHeaderError
from common.ring.memory import HUGE_PAGE_BYTES, PAGE_BYTES, round_up

HEADER_BYTES = PAGE_BYTES
_ALIGNMENT_BYTES = 256
_MAGIC = b"HEADRACE"
_VERSION = 1
_HEADER = struct.Struct("<8sQ16sQqqqqq")
HIDDEN_BYTES_PER_ELEMENT = {"bfloat16": 2, "float32": 4}


class SlotHeader(NamedTuple):
    """A target's description of the batch in a slot, written before the slot is announced."""

    plan_hash: bytes  # 16 bytes
    generation: int
    batch: int
    num_tokens: int
    num_samples: int
    hidden_checksum: int
    rows_checksum: int

    def pack_into(self, buffer: memoryview) -> None:
        _HEADER.pack_into(buffer, 0, _MAGIC, _VERSION, *self)

    @classmethod
    def unpack_from(cls, buffer: memoryview) -> "SlotHeader":
        magic, version, *fields = _HEADER.unpack_from(buffer, 0)
        if (magic, version) != (_MAGIC, _VERSION):
            raise SlotHeaderError(f"slot header: needed {_MAGIC!r} version {_VERSION}, found {magic!r} version {version}")
        return cls(*fields)


class Region(NamedTuple):
    """Start and element type of one array of a slot."""

    offset: int
    dtype: np.dtype[np.generic]


ROW_ARRAYS: dict[str, str] = {
    "input_ids": "int32",  # [T]
    "loss_mask": "uint8",  # [T]
    "position_ids": "int32",  # [T]
    "cu_seqlens": "int32",  # [D + 1]
    "sample_ids": "int64",  # [D]
}


class SlotLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The geometry of every slot of a run."""

    capacity_tokens: int
    capacity_samples: int
    num_taps: int
    hidden_size: int
    split: bool
    hidden_dtype: str
    rows: dict[str, Region]
    stride: int

    @classmethod
    def of(cls, config: Config) -> "SlotLayout":
        tokens, samples = config.plan.max_tokens_per_batch, config.plan.max_samples_per_batch
        taps, hidden = len(config.draft.tap_layers), config.shape.hidden_size
        elements = {"input_ids": tokens, "loss_mask": tokens, "position_ids": tokens}
        elements |= {"cu_seqlens": samples + 1, "sample_ids": samples}
        offset = HEADER_BYTES + tokens * taps * hidden * HIDDEN_BYTES_PER_ELEMENT[config.ring.dtype]
        rows: dict[str, Region] = {}
        for name, type_name in ROW_ARRAYS.items():
            offset = round_up(offset, _ALIGNMENT_BYTES)
            dtype = np.dtype(type_name)
            rows[name] = Region(offset, dtype)
            offset += elements[name] * dtype.itemsize
        return cls(
            capacity_tokens=tokens,
            capacity_samples=samples,
            num_taps=taps,
            hidden_size=hidden,
            split=config.ring.layout == "split" or any("+" in entry for entry in config.targets.devices),  # one copy per device
            hidden_dtype=config.ring.dtype,
            rows=rows,
            stride=round_up(offset, HUGE_PAGE_BYTES),
        )

    def hidden_shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Return [T, K, H] when packed, [K, T, H] when split."""
        if self.split:
            return (self.num_taps, num_tokens, self.hidden_size)
        return (num_tokens, self.num_taps, self.hidden_size)

    def hidden_bytes(self, num_tokens: int) -> int:
        return math.prod(self.hidden_shape(num_tokens)) * HIDDEN_BYTES_PER_ELEMENT[self.hidden_dtype]

    def ring_bytes(self, num_slots: int) -> int:
        return num_slots * self.stride
