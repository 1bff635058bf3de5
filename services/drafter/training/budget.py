"""The cost of batches and anchors on a drafter, and the anchor budget at which drafters and targets keep pace."""

import bisect
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from common.actor.messages import BatchShape
from common.config import Config
from common.device.memory import allowed_bytes
from services.drafter.model.anchors import anchors_of_tiles
from services.drafter.training.training_state import TrainingState, full_shape, make_up_batch

_PROBE_PART = 32  # divides the tokens of a batch: the smaller of the two budgets that are timed
_MEMORY_PART = 0.9  # of the memory that the device can still give
_NUM_TIMED = 2


class BatchCost(NamedTuple):
    """The cost of a batch on one drafter: seconds = `seconds` + `seconds_per_anchor` * anchors."""

    seconds: float
    seconds_per_anchor: float
    max_anchors: int  # that the device has room for


def with_anchors(config: Config, **budgets: int) -> Config:
    """Return the configuration with other values of train.anchors_per_batch or train.anchors_per_document."""
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, **budgets))


def balanced_anchors(costs: Sequence[BatchCost], batches_per_s: float, shapes: Sequence[BatchShape], config: Config) -> int:
    """Return the budget at which drafters take as many training batches as all targets make, or the closest possible.

    There is one cost per drafter, and the slowest sets the pace of all. The budget is a multiple of what fills whole tiles
    of the attention, holds one anchor for every document at least, and is no larger than a batch has tokens or the
    smallest device has room for.
    """
    seconds = len(costs) / batches_per_s  # that a drafter may take for a batch
    wanted = min((seconds - cost.seconds) / cost.seconds_per_anchor for cost in costs)
    most = min(config.plan.max_tokens_per_batch, *(cost.max_anchors for cost in costs))
    step, least = anchors_of_tiles(config.draft.block_size), config.plan.max_samples_per_batch
    budgets = range(step, most + 1, step)
    num_steps = bisect.bisect_right(budgets, wanted, key=lambda budget: mean_anchors(budget, shapes, config))
    return max(step * num_steps, math.ceil(least / step) * step)


def mean_anchors(budget: int, shapes: Sequence[BatchShape], config: Config) -> float:
    """Return the mean anchors of a batch: few documents cannot use the whole budget, because each has a limit of its own."""
    per_document = config.train.anchors_per_document
    limits = [(shape.num_rows * min(per_document, shape.length), shape.num_batches) for shape in shapes]
    num_batches = sum(count for _, count in limits)
    return sum(min(budget, limit) * count for limit, count in limits) / max(1, num_batches)


def measure_cost(state: TrainingState, config: Config) -> BatchCost:
    """Time complete steps at two budgets without changing a bit of the state."""
    step = anchors_of_tiles(config.draft.block_size)
    few = math.ceil(max(config.plan.max_tokens_per_batch / _PROBE_PART, 1) / step) * step
    (seconds, few_bytes), (more_seconds, many_bytes) = (_time_step(state, config, anchors) for anchors in (few, 2 * few))
    per_anchor = max((more_seconds - seconds) / few, 1e-9)
    return BatchCost(max(seconds - per_anchor * few, 0.0), per_anchor, _max_anchors(state.device, few, few_bytes, many_bytes))


def _time_step(state: TrainingState, config: Config, anchors: int) -> tuple[float, int]:
    """Return the seconds of a batch with its share of the optimizer's step, and the peak memory in bytes."""
    config = with_anchors(config, anchors_per_batch=anchors, anchors_per_document=anchors)  # so that all are used
    batch, device, taken_s = make_up_batch(*full_shape(config), config, state.device), state.device, []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for turn in range(1 + _NUM_TIMED):  # the first compiles
        began = _now(device)
        state.rehearse_batch(batch, config, epoch=turn)
        computed = _now(device)
        state.rehearse_step()
        taken_s.append(computed - began + (_now(device) - computed) / config.accumulation)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return min(taken_s[1:]), peak


def _max_anchors(device: torch.device, few: int, few_bytes: int, many_bytes: int) -> int:
    """Extrapolate from the peaks at `few` and twice as many anchors; a CPU has no limit."""
    if device.type != "cuda":
        return 1 << 31
    room = max(0, allowed_bytes(device) - many_bytes) * _MEMORY_PART
    return 2 * few + int(room / max(1, (many_bytes - few_bytes) / few))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
