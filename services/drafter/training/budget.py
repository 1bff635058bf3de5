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

_PROBE_PART = 32  # of the tokens of a batch: the smaller of the two budgets that are timed
_MEMORY_PART = 0.9  # of what the device can still give
_NUM_TIMED = 2


class BatchCost(NamedTuple):
    """The cost of a batch on one drafter: seconds = `seconds` + `seconds_per_anchor` * anchors."""

    seconds: float
    seconds_per_anchor: float
    max_anchors: int  # that the device has room for


def with_anchors(config: Config, anchors_per_batch: int) -> Config:
    """The same configuration with this budget."""
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, anchors_per_batch=anchors_per_batch))


def all_taken(config: Config, anchors_per_batch: int) -> Config:
    """The same, where no limit of a document leaves some of the budget unused."""
    train = msgspec.structs.replace(config.train, anchors_per_batch=anchors_per_batch, anchors_per_document=anchors_per_batch)
    return msgspec.structs.replace(config, train=train)


def balanced_anchors(costs: Sequence[BatchCost], batches_per_s: float, shapes: Sequence[BatchShape], config: Config) -> int:
    """The budget at which drafters of these costs take as many batches as targets make, as far as that can be.

    It is a multiple of what fills whole tiles of the attention, holds one anchor for every document at least, and is
    no larger than a batch has tokens or the smallest device has room for.

    Args:
        costs: one per drafter; the slowest sets the pace of all.
        batches_per_s: of all targets together.
        shapes: of the training batches.
        config: the shapes and the plan.
    """
    seconds = len(costs) / batches_per_s  # that a drafter may take for a batch
    wanted = min((seconds - cost.seconds) / cost.seconds_per_anchor for cost in costs)
    most = min(config.plan.max_tokens_per_batch, *(cost.max_anchors for cost in costs))
    step, least = anchors_of_tiles(config.draft.block_size), config.plan.max_samples_per_batch
    budgets = range(step, most + 1, step)
    place = bisect.bisect_right(budgets, wanted, key=lambda budget: mean_anchors(budget, shapes, config))
    return max(step * place, math.ceil(least / step) * step)


def mean_anchors(budget: int, shapes: Sequence[BatchShape], config: Config) -> float:
    """Of a batch: one of few documents cannot have the whole budget, for each may have so many and no more."""
    per_document = config.train.anchors_per_document
    limits = [(shape.num_rows * min(per_document, shape.length), shape.num_batches) for shape in shapes]
    num_batches = sum(count for _, count in limits)
    return sum(min(budget, limit) * count for limit, count in limits) / max(1, num_batches)


def measure_cost(state: TrainingState, config: Config) -> BatchCost:
    """Time whole steps at two budgets; none changes a bit of the state."""
    step = anchors_of_tiles(config.draft.block_size)
    few = math.ceil(max(config.plan.max_tokens_per_batch / _PROBE_PART, 1) / step) * step
    (seconds, few_bytes), (more_seconds, many_bytes) = (_time_step(state, all_taken(config, n)) for n in (few, 2 * few))
    per_anchor = max((more_seconds - seconds) / few, 1e-9)
    return BatchCost(max(seconds - per_anchor * few, 0.0), per_anchor, _max_anchors(state, few, few_bytes, many_bytes))


def _time_step(state: TrainingState, config: Config) -> tuple[float, int]:
    """Seconds of a batch with its share of the optimizer's step, and the memory it takes at its peak."""
    batch, device, taken_s = make_up_batch(*full_shape(config), config, state.device), state.device, []
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for turn in range(1 + _NUM_TIMED):  # the first compiles
        marks = [_now(device)]
        state.rehearse_batch(batch, config, epoch=turn)
        marks.append(_now(device))
        state.rehearse_step()
        marks.append(_now(device))
        taken_s.append(marks[1] - marks[0] + (marks[2] - marks[1]) / config.accumulation)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return min(taken_s[1:]), peak


def _max_anchors(state: TrainingState, few: int, few_bytes: int, many_bytes: int) -> int:
    """By what the peaks at `few` and twice as many anchors say of more; a CPU has no limit."""
    device = state.device
    if device.type != "cuda":
        return 1 << 31
    room = max(0, allowed_bytes(device) - many_bytes) * _MEMORY_PART
    return 2 * few + int(room / max(1, (many_bytes - few_bytes) / few))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
