"""Rings on real hardware: registered shared memory, several processes on it, and one that dies in mid-copy.

How fast it is stands in `python -m launch.bench transport`.
"""

import os
import time

import pytest
import torch

from common.errors import HeadraceError
from common.ring import memory
from common.ring.checksum import checksum
from common.ring.layout import SlotLayout
from common.ring.ring import RingWriter, page_lock
from launch.bench.shapes import random_run
from tests.builders.copier import Copier, Ring, wait_until_copying

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")
NUM_SLOTS, NUM_TOKENS = 2, 2048
NUM_BYTES = 64 * 2**20


def map_memory(num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] of a memfd, populated."""
    fd = memory.create("test", num_bytes)
    tensor = torch.frombuffer(memoryview(memory.attach(fd)), dtype=torch.uint8)
    os.close(fd)
    return tensor


def unregister(tensor: torch.Tensor) -> None:
    assert int(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr())) == 0  # type: ignore[no-untyped-call]


def test_a_registered_memfd_is_pinned_and_carries_every_byte_both_ways() -> None:
    host, back = map_memory(NUM_BYTES), map_memory(NUM_BYTES)
    assert not host.is_pinned()
    for tensor in (host, back):
        page_lock(tensor)
        assert tensor.is_pinned()
    host.view(torch.int64).copy_(torch.randint(2**62, (NUM_BYTES // 8,), generator=torch.Generator().manual_seed(0)))
    near = torch.empty_like(host, device=GPU)
    near.copy_(host, non_blocking=True)
    back.copy_(near, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(back, host)
    assert int(checksum(near.view(torch.int64))) == int(checksum(host.view(torch.int64)))
    for tensor in (host, back):
        unregister(tensor)


def test_a_copy_from_registered_memory_does_not_hold_up_the_host() -> None:
    """Pageable memory would be staged while the call waits, so that its copy is done when the call returns."""
    host = map_memory(NUM_BYTES)
    page_lock(host)
    near = torch.empty_like(host, device=GPU)
    busy = torch.randn(8192, 8192, device=GPU)
    torch.cuda.synchronize()
    for _ in range(20):
        busy = (busy @ busy).tanh_()
    near.copy_(host, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()
    assert not copied.query()  # type: ignore[no-untyped-call]
    copied.synchronize()
    unregister(host)


def test_registering_twice_is_an_error_and_leaves_the_memory_usable() -> None:
    host = map_memory(NUM_BYTES)
    page_lock(host)
    with pytest.raises(HeadraceError, match="67108864 bytes: needed to be registered once, found registered already"):
        page_lock(host)
    torch.ones(1, device=GPU)  # no error is left behind for the next launch
    near = host.to(GPU, non_blocking=True)
    torch.cuda.synchronize()
    assert not near.any()
    unregister(host)


@pytest.fixture(scope="module")
def ring() -> tuple[Ring, list[torch.Tensor]]:
    """A ring of two slots of 84 MB, as another process can open it, and its slots as they are opened here."""
    layout = SlotLayout.of(random_run("qwen3_8b", NUM_TOKENS))
    fd = memory.create("test-ring", layout.ring_bytes(NUM_SLOTS))
    writer = RingWriter(fd, layout, NUM_SLOTS)
    slots = [writer.open(index, NUM_TOKENS, 1).hidden_states for index in range(NUM_SLOTS)]
    return Ring.of(fd, layout, NUM_SLOTS), slots


def test_several_processes_register_and_use_the_same_memory(ring: tuple[Ring, list[torch.Tensor]]) -> None:
    shared, slots = ring
    slots[0].zero_()
    slots[1].fill_(3.0)
    copiers = [Copier(shared, index, GPU, into_slot=index == 0) for index in range(2)]
    wait_until_copying(copiers)
    read = slots[1].to(GPU)  # while another process reads it too
    for copier in copiers:
        copier.kill()
    assert torch.equal(read, torch.full_like(read, 3.0))
    assert ((slots[0] == 1.0) | (slots[0] == 2.0)).all()  # what the other process copied in


def test_no_byte_changes_once_the_end_of_a_process_killed_in_mid_copy_is_known(ring: tuple[Ring, list[torch.Tensor]]) -> None:
    shared, slots = ring
    copiers = [Copier(shared, index, GPU, into_slot=True) for index in range(NUM_SLOTS)]
    wait_until_copying(copiers)
    for slot, copier in zip(slots, copiers, strict=True):
        words = slot.view(torch.int16).view(-1)
        copier.kill()  # returns when its pidfd fired
        few, all_words = words[:: memory.PAGE_BYTES].clone(), words.clone()
        time.sleep(0.5)
        assert torch.equal(words[:: memory.PAGE_BYTES], few)
        assert torch.equal(words, all_words)
