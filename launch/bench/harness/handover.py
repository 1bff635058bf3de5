"""From a filled slot to the drafter that waits for it: the real exchange process, real ZeroMQ, and two ends of a ring.

target end   lease -> copy into the slot -> event -> (stamp) -> header -> SlotReady
drafter end  Next -> Grant -> (stamp) -> Release
"""

import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from common import config as configuration
from common.actor.channel import Channel
from common.actor.lifecycle import start_time
from common.actor.messages import (
    PROTOCOL_VERSION,
    Finished,
    Grant,
    Hello,
    Incarnation,
    Lease,
    Next,
    Release,
    ReplyBody,
    RequestBody,
    SlotReady,
    Welcome,
    Work,
)
from common.device.copy_stream import CopyStream, mark_computation
from common.ring.layout import SlotHeader, SlotLayout
from common.run_dir import exchange_address
from launch.bench.harness.copier import SPAWN, Ring
from launch.bench.harness.stage import Stage
from launch.bench.shapes import NUM_SAMPLES, random_run

_TOKENS = 128  # a small slot: what is measured begins when it is full
_PATIENCE_S = 60.0  # for one answer
_BETWEEN_S = 0.002  # so that the drafter waits, as it does behind a target that computes


class Granted(NamedTuple):
    """A batch at the drafter; seconds on CLOCK_MONOTONIC."""

    asked_s: float
    came_s: float


def measure_handover(device: torch.device, num_batches: int) -> list[float]:
    """Seconds from the event of a batch's copy to its Grant, for batches that the drafter was waiting for, ascending.

    There are `num_batches` in all, rounded up to whole epochs.
    """
    settings = [f"plan.epochs={-(-num_batches // NUM_SAMPLES)}", "plan.max_samples_per_batch=1"]
    with Stage(random_run("qwen3_8b", _TOKENS, settings), "hand-over") as stage:
        stage.await_ready(stage.start("exchange"))
        ring = Ring.of(stage.fds.rings[0], SlotLayout.of(stage.config), stage.config.ring.num_slots)
        with ProcessPoolExecutor(2, SPAWN) as pool:
            ends = pool.submit(target_end, stage.run_dir, ring, device), pool.submit(drafter_end, stage.run_dir)
            fired, granted = ends[0].result(), ends[1].result()
    return sorted(granted[batch].came_s - when for batch, when in fired.items() if granted[batch].asked_s < when)


def target_end(folder: Path, ring: Ring, device: torch.device) -> dict[int, float]:
    """Fill a slot for every batch and announce it; batch -> when its event had fired, on CLOCK_MONOTONIC."""
    torch.set_num_threads(1)
    writer, copies, fired = ring.open(), CopyStream(device), {}
    near = torch.ones(ring.layout.hidden_shape(_TOKENS), dtype=torch.bfloat16, device=device)
    channel, plan_hash = _join(folder, "target")
    for _ in range(NUM_SAMPLES * configuration.read(folder).plan.epochs):
        lease = _ask(channel, Work([]))
        assert isinstance(lease, Lease)
        slot = writer.open(lease.slot % ring.num_slots, _TOKENS, 1)
        time.sleep(_BETWEEN_S)
        with copies.after(mark_computation(device)):
            slot.hidden_states.copy_(near, non_blocking=True)
        copies.mark().wait()
        fired[lease.info.batch] = time.monotonic()
        slot.seal(SlotHeader(plan_hash, lease.generation, lease.info.batch, _TOKENS, 1, 0, 0))
        _ask(channel, SlotReady(lease.slot, lease.generation))
    channel.close()
    return fired


def drafter_end(folder: Path) -> dict[int, Granted]:
    """Take every batch; what was seen of each."""
    channel, _ = _join(folder, "drafter")
    granted: dict[int, Granted] = {}
    asked_s = time.monotonic()
    while not isinstance(reply := _ask(channel, Next(len(granted))), Finished):
        assert isinstance(reply, Grant)
        granted[reply.info.batch] = Granted(asked_s, time.monotonic())
        _ask(channel, Release(reply.slot, reply.generation, intact=True))
        asked_s = time.monotonic()
    channel.close()
    return granted


def _join(folder: Path, role: str) -> tuple[Channel, bytes]:
    channel = Channel(exchange_address(folder), Incarnation(role, 0, os.getpid(), start_time(os.getpid())))
    welcome = _ask(channel, Hello(PROTOCOL_VERSION))
    assert isinstance(welcome, Welcome)
    return channel, welcome.plan_hash


def _ask(channel: Channel, body: RequestBody) -> ReplyBody:
    deadline = time.monotonic() + _PATIENCE_S
    return channel.ask(body, lambda: time.monotonic() < deadline)
