"""Which bytes of a slot are which array."""

import itertools
import struct
from typing import Any

import msgspec
import pytest

from common.errors import SlotHeaderError
from common.ring.layout import HEADER_BYTES, ROW_ARRAYS, SlotHeader, SlotLayout
from tests.builders.small_runs import make_config

HEADER = SlotHeader(b"0123456789abcdef", 2**63 + 1, 2**40, 300, 7, -(2**63), 2**63 - 1)


def make_layout(layout: str = "packed", dtype: str = "bfloat16", **plan: Any) -> SlotLayout:
    config = make_config(**plan)
    ring = msgspec.convert({"layout": layout, "dtype": dtype}, type(config.ring))
    return SlotLayout.of(msgspec.structs.replace(config, ring=ring))


@pytest.mark.parametrize("layout", ["packed", "split"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("tokens", "samples"), [(16, 2), (8, 1), (1237, 13), (4096, 64)])
def test_arrays_are_aligned_do_not_touch_and_fit(layout: str, dtype: str, tokens: int, samples: int) -> None:
    slot = make_layout(layout, dtype, max_tokens=tokens, samples=samples)
    counts = dict.fromkeys(("input_ids", "loss_mask", "position_ids"), tokens) | {
        "cu_seqlens": samples + 1,
        "sample_ids": samples,
    }
    spans = [(HEADER_BYTES, HEADER_BYTES + slot.hidden_bytes(tokens))]
    for name, region in slot.rows.items():
        assert region.offset % 256 == 0
        assert region.dtype.name == ROW_ARRAYS[name]
        spans.append((region.offset, region.offset + counts[name] * region.dtype.itemsize))
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= slot.stride
    assert slot.stride % (2 * 1024 * 1024) == 0 and slot.stride - spans[-1][1] < 2 * 1024 * 1024
    assert slot.ring_bytes(5) == 5 * slot.stride
    assert (slot.capacity_tokens, slot.capacity_samples) == (tokens, samples)


def test_the_shape_of_the_hidden_states() -> None:
    packed, split = make_layout("packed"), make_layout("split", "float32")
    assert packed.hidden_shape(11) == (11, 2, 8) and not packed.split
    assert split.hidden_shape(11) == (2, 11, 8) and split.split
    assert packed.hidden_bytes(11) == 11 * 2 * 8 * 2
    assert split.hidden_bytes(11) == 11 * 2 * 8 * 4


def test_both_layouts_have_the_same_offsets() -> None:
    packed, split = make_layout("packed"), make_layout("split")
    assert packed.rows == split.rows and packed.stride == split.stride


def test_a_header_comes_back_as_it_was_written() -> None:
    slot = bytearray(HEADER_BYTES)
    HEADER.pack_into(memoryview(slot))
    assert SlotHeader.unpack_from(memoryview(slot)) == HEADER
    assert slot.startswith(b"HEADRACE") and not any(slot[80:])


@pytest.mark.parametrize("offset", [0, 7, 8])
def test_what_is_no_header_of_this_version_is_refused(offset: int) -> None:
    slot = bytearray(HEADER_BYTES)
    HEADER.pack_into(memoryview(slot))
    slot[offset] ^= 1
    with pytest.raises(SlotHeaderError, match=r"slot header: needed b'HEADRACE' version 1, found b'.*' version \d"):
        SlotHeader.unpack_from(memoryview(slot))


def test_fresh_memory_is_no_header() -> None:
    with pytest.raises(SlotHeaderError, match="version 0"):
        SlotHeader.unpack_from(memoryview(bytes(HEADER_BYTES)))


def test_a_hash_of_another_size_is_not_cut_silently() -> None:
    slot = memoryview(bytearray(HEADER_BYTES))
    HEADER._replace(plan_hash=b"0123456789abcdef").pack_into(slot)
    with pytest.raises(struct.error):
        HEADER._replace(batch=2**63).pack_into(slot)
