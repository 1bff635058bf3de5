"""Slots as tensors, in two real processes over one memfd."""

import ast
import gc
import os
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import pytest
import torch

from common.actor.messages import SlotReady
from common.errors import SharedMemoryError, SlotHeaderError, SlotSizeError
from common.ring import memory
from common.ring.checksum import checksum
from common.ring.layout import SlotHeader, SlotLayout
from common.ring.ring import RingReader, RingWriter, Rows
from tests.builders.process_run import Inherited
from tests.builders.small_runs import make_config
from tests.builders.warm_start import FORKS

Layout = Literal["packed", "split"]
ROOT = Path(__file__).parents[3]
NUM_SLOTS = 3
TOKENS, TAPS, HIDDEN = 11, 2, 8


def make_layout(layout: Layout) -> SlotLayout:
    config = make_config()
    ring = msgspec.structs.replace(config.ring, layout=layout)
    return SlotLayout.of(msgspec.structs.replace(config, ring=ring))


def make_features(index: int) -> torch.Tensor:
    """[T, K, H], different in every slot, with the odd values that bits can be."""
    generator = torch.Generator().manual_seed(index)
    features = torch.randn((TOKENS, TAPS, HIDDEN), generator=generator).to(torch.bfloat16)
    features[0, 0, :4] = torch.tensor([float("inf"), -0.0, 1e-39, -float("inf")])
    return features


def make_rows(index: int) -> Rows:
    return Rows(
        input_ids=np.arange(TOKENS) + 100 * index,
        loss_mask=np.arange(TOKENS) % 2,
        position_ids=np.array([0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6]),
        cu_seqlens=np.array([0, 4, TOKENS]),
        sample_ids=np.array([2**40 + index, index]),
    )


def fill_slots(fd: int, layout: Layout) -> None:
    writer = RingWriter(fd, make_layout(layout), NUM_SLOTS)
    for index in range(NUM_SLOTS):
        slot = writer.open(index, TOKENS, 2)
        features = make_features(index)
        slot.hidden_states.copy_(features.transpose(0, 1) if layout == "split" else features)
        rows = make_rows(index)
        for view, array in zip(slot.rows, rows, strict=True):
            view[:] = array
        slot.seal(SlotHeader(b"p" * 16, index, index, TOKENS, 2, int(checksum(features)), rows.checksum()))


def fill_slots_of(ring: Inherited, layout: Layout) -> None:
    """Run the writing process."""
    fill_slots(ring.fd, layout)


@pytest.fixture(params=["packed", "split"])
def layout(request: pytest.FixtureRequest) -> Layout:
    chosen: Layout = request.param
    return chosen


def make_ring(layout: Layout) -> int:
    return memory.create("test-ring", make_layout(layout).ring_bytes(NUM_SLOTS))


def test_what_one_process_writes_another_reads_bit_for_bit(layout: Layout) -> None:
    fd = make_ring(layout)
    reader = RingReader(fd, make_layout(layout), NUM_SLOTS)
    writer = FORKS.Process(target=fill_slots_of, args=(Inherited(fd), layout))
    writer.start()
    writer.join()
    assert writer.exitcode == 0
    os.close(fd)
    for index in range(NUM_SLOTS):
        slot = reader.open(index)
        features = slot.hidden_states.transpose(0, 1) if layout == "split" else slot.hidden_states
        assert torch.equal(features.contiguous().view(torch.int16), make_features(index).view(torch.int16))
        assert int(checksum(slot.hidden_states)) == slot.header.hidden_checksum
        for array, expected in zip(slot.rows, make_rows(index), strict=True):
            assert array.tolist() == expected.tolist()
        assert slot.rows.checksum() == slot.header.rows_checksum
        assert slot.header[:5] == (b"p" * 16, index, index, TOKENS, 2)


def test_packed_and_split_slots_hold_the_same_features() -> None:
    layouts: tuple[Layout, Layout] = ("packed", "split")
    views = []
    for layout in layouts:
        fd = make_ring(layout)
        fill_slots(fd, layout)
        hidden_states = RingReader(fd, make_layout(layout), NUM_SLOTS).open(2).hidden_states
        views.append(hidden_states.transpose(0, 1) if layout == "split" else hidden_states)
        os.close(fd)
    assert views[0].shape == views[1].shape == (TOKENS, TAPS, HIDDEN)
    assert torch.equal(views[0].contiguous().view(torch.int16), views[1].contiguous().view(torch.int16))


def test_views_keep_the_memory_mapped_after_ring_and_descriptor_are_gone(layout: Layout) -> None:
    fd = make_ring(layout)
    fill_slots(fd, layout)
    reader = RingReader(fd, make_layout(layout), NUM_SLOTS)
    slot = reader.open(1)
    hidden_states, input_ids = slot.hidden_states[:], slot.rows.input_ids[3:]
    expected = hidden_states.clone()
    del reader, slot
    os.close(fd)
    gc.collect()
    fd = make_ring(layout)
    other = memory.attach(fd)  # would be mapped at the same addresses
    os.close(fd)
    assert torch.equal(hidden_states.view(torch.int16), expected.view(torch.int16))
    assert input_ids.tolist() == list(range(103, 100 + TOKENS))
    hidden_states.zero_()
    assert not any(other[:])


def test_memory_of_another_size_is_refused(layout: Layout) -> None:
    fd = make_ring(layout)
    for wrong in (NUM_SLOTS - 1, NUM_SLOTS + 1):
        with pytest.raises(SharedMemoryError, match=rf"ring memory: needed {wrong * 2 * 2**20} bytes, found 6291456"):
            RingWriter(fd, make_layout(layout), wrong)
    os.close(fd)


@pytest.mark.parametrize(("tokens", "samples"), [(17, 2), (16, 3), (0, 1), (1, 0), (-1, 1)])
def test_a_batch_that_does_not_fit_is_refused_by_writer_and_reader(layout: Layout, tokens: int, samples: int) -> None:
    fd = make_ring(layout)
    writer, reader = (kind(fd, make_layout(layout), NUM_SLOTS) for kind in (RingWriter, RingReader))
    os.close(fd)
    assert isinstance(writer, RingWriter) and isinstance(reader, RingReader)
    message = f"slot: needed 1 to 16 tokens and 1 to 2 samples, found {tokens} and {samples}"
    with pytest.raises(SlotSizeError, match=message):
        writer.open(0, tokens, samples)
    writer.open(0, 16, 2).seal(SlotHeader(b"p" * 16, 1, 1, tokens, samples, 0, 0))
    with pytest.raises(SlotSizeError, match=message):
        reader.open(0)


def test_a_slot_that_was_never_sealed_is_refused(layout: Layout) -> None:
    fd = make_ring(layout)
    RingWriter(fd, make_layout(layout), NUM_SLOTS).open(0, TOKENS, 2).hidden_states.fill_(1.0)
    with pytest.raises(SlotHeaderError, match="slot header: needed"):
        RingReader(fd, make_layout(layout), NUM_SLOTS).open(0)
    os.close(fd)


def test_a_batch_writes_into_its_own_slot_only(layout: Layout) -> None:
    fd = make_ring(layout)
    writer = RingWriter(fd, make_layout(layout), NUM_SLOTS)
    slot = writer.open(1, 16, 2)
    slot.hidden_states.fill_(-1.0)
    for array in slot.rows:
        array.fill(1)
    mapping, stride = memory.attach(fd), writer.layout.stride
    os.close(fd)
    assert not any(mapping[:stride]) and not any(mapping[2 * stride :])
    assert sum(bool(byte) for byte in mapping[stride : 2 * stride]) == 16 * TAPS * HIDDEN * 2 + 16 * 3 + 3 + 2


def test_an_exchange_of_two_row_arrays_changes_their_checksum() -> None:
    rows = make_rows(0)
    assert rows._replace(input_ids=rows.position_ids, position_ids=rows.input_ids).checksum() != rows.checksum()


def test_only_a_sealed_slot_is_announced(layout: Layout) -> None:
    """The announcement has the slot's number in the run and the generation of its header."""
    fd = make_ring(layout)
    slot = RingWriter(fd, make_layout(layout), NUM_SLOTS).open(2 * NUM_SLOTS + 1, TOKENS, 2)
    sealed = slot.seal(SlotHeader(b"p" * 16, 7, 5, TOKENS, 2, 0, 0))
    assert sealed.announcement() == SlotReady(2 * NUM_SLOTS + 1, 7)
    assert RingReader(fd, make_layout(layout), NUM_SLOTS).open(1).header.generation == 7
    os.close(fd)
    makers = [path for room in ("common", "services") for path in (ROOT / room).rglob("*.py") if makes_slot_ready(path)]
    assert makers == [ROOT / "common" / "ring" / "ring.py"]


def makes_slot_ready(path: Path) -> bool:
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    return any(isinstance(function, ast.Name) and function.id == "SlotReady" for function in calls)
