"""The memory of a ring, and the copies between a slot and a device.

    python -m launch.bench transport [--shape qwen3_6_27b] [--tokens 16384] [--slots 4]

Rings are the real ones (`common.ring.ring`) in the layout of the run. Without a GPU the copies are memcpy, smaller, and the
rows that need one say so.
"""

import argparse
import mmap
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from common.device.copy_stream import CopyStream, mark_computation
from common.device.memory import GIB
from common.ring import memory
from common.ring.layout import SlotLayout
from common.ring.ring import RingWriter, page_lock
from launch.bench.harness.table import Rows, print_rows
from launch.bench.shapes import SHAPES, random_run

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NUM_ROUNDS, NUM_COPIES = 5, 4
PEER = "torch pinned" if ON_GPU else "private memory"

T = TypeVar("T")


def measure(layout: SlotLayout, num_slots: int) -> Rows:
    """Yield the rows of the table, as they are measured. Registered memory stays mapped until the end: CUDA remembers it."""
    num_bytes = layout.ring_bytes(num_slots)
    fd, created_s = timed(lambda: memory.create("bench-ring", num_bytes))
    yield f"ring of {num_slots} slots, {num_bytes / GIB:.2f} GiB: allocate", per_gib(created_s, num_bytes)
    first, populated_s = timed(lambda: to_tensor(memory.attach(fd)))
    yield "  map and populate", per_gib(populated_s, num_bytes)
    _, registered_s = timed(lambda: page_lock(first))
    yield "  register the populated pages", per_gib(registered_s, num_bytes) if ON_GPU else "needs a GPU"
    unregistered, again_s = timed(lambda: to_tensor(memory.attach(fd)))
    yield "  map and populate once more, as a restarted process does", per_gib(again_s, num_bytes)
    writer = RingWriter(fd, layout, num_slots)
    slots = [writer.open(index, layout.capacity_tokens, 1).hidden_states for index in range(2)]
    yield from measure_copies(slots[0], unregistered)
    yield from measure_both_ways(slots)
    os.close(fd)


def measure_copies(slot: torch.Tensor, unregistered: torch.Tensor) -> Rows:
    """Copy a slot each way, in turns with memory that torch pinned and memory that is not pinned."""
    near = torch.ones_like(slot, device=DEVICE)
    hosts = {"slot": slot, PEER: make_peer(slot)}
    if ON_GPU:
        hosts["not registered"] = unregistered[: slot.nbytes].view(slot.dtype).view(slot.shape)
    for direction, into_slot in (("to the device", False), ("from the device", True)):
        pairs = {name: (host, near) if into_slot else (near, host) for name, host in hosts.items()}
        copies = {name: partial(to.copy_, source, non_blocking=True) for name, (to, source) in pairs.items()}
        rates: dict[str, list[float]] = {name: [] for name in copies}
        for _ in range(NUM_ROUNDS):
            for name, action in copies.items():
                rates[name].append(slot.nbytes * NUM_COPIES / time_s([action] * NUM_COPIES) / 1e9)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        ratio = statistics.median(a / b for a, b in zip(rates["slot"], rates[PEER], strict=True))
        described = ", ".join(f"{name} {value:.1f}" for name, value in medians.items())
        yield f"slot of {slot.nbytes / GIB:.2f} GiB {direction}", f"{described} GB/s"
        yield f"  slot over {PEER}", f"{ratio:.3f}"


def measure_both_ways(slots: list[torch.Tensor]) -> Rows:
    """Copy into one slot and out of another at once, on two streams."""
    peers, near = [make_peer(slots[0]) for _ in range(2)], [torch.ones_like(slots[0], device=DEVICE) for _ in range(2)]
    streams = [CopyStream(DEVICE) for _ in range(2)]

    def both_ways(host: list[torch.Tensor]) -> float:
        def copy() -> None:
            for stream, to, source in zip(streams, (near[0], host[1]), (host[0], near[1]), strict=True):
                with stream.after(mark_computation(DEVICE)):
                    to.copy_(source, non_blocking=True)

        return 2 * host[0].nbytes * NUM_COPIES / time_s([copy] * NUM_COPIES) / 1e9

    rates = [(both_ways(slots), both_ways(peers)) for _ in range(NUM_ROUNDS)]
    ring_rate, peer_rate = (statistics.median(values) for values in zip(*rates, strict=True))
    yield "both ways at once", f"slots {ring_rate:.1f}, {PEER} {peer_rate:.1f} GB/s together"


def make_peer(slot: torch.Tensor) -> torch.Tensor:
    """Make host memory of the same size that torch owns."""
    peer = torch.zeros_like(slot)
    return peer.pin_memory() if ON_GPU else peer


def to_tensor(mapping: mmap.mmap) -> torch.Tensor:
    """Return the bytes as a tensor, which keeps the mapping open."""
    return torch.frombuffer(memoryview(mapping), dtype=torch.uint8)


def timed(action: Callable[[], T]) -> tuple[T, float]:
    """Return the result and the seconds that it took."""
    began = time.perf_counter()
    result = action()
    return result, time.perf_counter() - began


def time_s(copies: list[Callable[[], object]]) -> float:
    """Return the seconds of all copies, launched without waiting in between, after one that is not counted."""
    copies[0]()
    _synchronize()
    began = time.perf_counter()
    for copy in copies:
        copy()
    _synchronize()
    return time.perf_counter() - began


def per_gib(seconds: float, num_bytes: int) -> str:
    return f"{seconds / num_bytes * GIB:.3f} s/GiB"


def _synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.bench transport")
    parser.add_argument("--shape", choices=[*SHAPES, "tiny"], default="qwen3_6_27b")
    parser.add_argument("--tokens", type=int, default=16384 if ON_GPU else 512, help="of a slot")
    parser.add_argument("--slots", type=int, default=4, help="of the ring, at least 2")
    options = parser.parse_args(arguments)
    layout = SlotLayout.of(random_run(options.shape, options.tokens))
    print(f"{torch.cuda.get_device_name() if ON_GPU else 'CPU'}, torch {torch.__version__}, {' '.join(arguments)}")
    print_rows(measure(layout, options.slots))
    return 0
