"""The anchor budget that lets drafters and targets keep pace, where train.anchors_per_batch is "auto".

    every target    measures its tokens per second after its warm-up             -> its record on the board
    every drafter   measures what a batch and what an anchor costs on its device -> its record on the board
    drafter 0       waits for all of them, chooses, and keeps the choice          -> anchors.json
    every drafter   reads the file, now and after every restart

Nobody measures once the file is there.
"""

import bisect
import logging
import math
import time
from collections.abc import Sequence

import msgspec
import torch

from common.actor.lifecycle import Actor
from common.actor.messages import BatchShape, Welcome
from common.anchor_budget import AnchorBudget, BatchCost, read_budget, write_budget
from common.config import Config
from common.device.memory import allowed_bytes
from services.drafter.model.anchors import anchors_of_tiles
from services.drafter.training.training_state import TrainingState, full_shape, make_up_batch

_PROBE_PART = 32  # of the tokens of a batch: the smaller of the two budgets that are timed
_MEMORY_PART = 0.9  # of what the device can still give
_NUM_TIMED = 2
_POLL_S = 0.05
log = logging.getLogger(__name__)


def settle_anchors(actor: Actor, state: TrainingState, welcome: Welcome) -> Config:
    """Return the configuration with a number in place of "auto".

    Args:
        actor: this drafter.
        state: before its first step, and so it stays.
        welcome: what the plan says of the run's batches.

    Raises:
        StoppedError: a stop was requested before the choice.
    """
    config = actor.config
    if config.train.anchors_per_batch != "auto":
        return config
    budget = read_budget(config, actor.run_dir)
    if budget is None:
        cost = measure_cost(state, config)
        actor.notices.show_cost(cost.seconds, cost.seconds_per_anchor, cost.max_anchors)
        log.info("a batch takes %.4f s and %.3g s for each anchor", cost.seconds, cost.seconds_per_anchor)
        budget = _choose(actor, welcome) if actor.index == 0 else None
    while budget is None:
        _wait(actor)
        budget = read_budget(config, actor.run_dir)
    log.info("train.anchors_per_batch = %d (anchors.json)", budget.anchors_per_batch)
    return with_anchors(config, budget.anchors_per_batch)


def with_anchors(config: Config, anchors_per_batch: int) -> Config:
    """Return the configuration with this budget."""
    return msgspec.structs.replace(config, train=msgspec.structs.replace(config.train, anchors_per_batch=anchors_per_batch))


def all_taken(config: Config, anchors_per_batch: int) -> Config:
    """Return the configuration with this budget and no limit per document, so that all of it is used."""
    train = msgspec.structs.replace(config.train, anchors_per_batch=anchors_per_batch, anchors_per_document=anchors_per_batch)
    return msgspec.structs.replace(config, train=train)


def balanced_anchors(costs: Sequence[BatchCost], batches_per_s: float, shapes: Sequence[BatchShape], config: Config) -> int:
    """Return the budget at which drafters of these costs take as many batches as targets make, or the nearest one.

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
    index = bisect.bisect_right(budgets, wanted, key=lambda budget: mean_anchors(budget, shapes, config))
    return max(step * index, math.ceil(least / step) * step)


def mean_anchors(budget: int, shapes: Sequence[BatchShape], config: Config) -> float:
    """Return the mean anchors of a batch; the limit per document keeps batches of few documents under the budget."""
    per_document = config.train.anchors_per_document
    limits = [(shape.num_rows * min(per_document, shape.length), shape.num_batches) for shape in shapes]
    num_batches = sum(count for _, count in limits)
    return sum(min(budget, limit) * count for limit, count in limits) / max(1, num_batches)


def measure_cost(state: TrainingState, config: Config) -> BatchCost:
    """Time complete training steps at two budgets, without changing weights or optimizer state."""
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
    """Extrapolate the largest number of anchors from the peaks at `few` and twice as many; a CPU has no limit."""
    device = state.device
    if device.type != "cuda":
        return 1 << 31
    room = max(0, allowed_bytes(device) - many_bytes) * _MEMORY_PART
    return 2 * few + int(room / max(1, (many_bytes - few_bytes) / few))


def _choose(actor: Actor, welcome: Welcome) -> AnchorBudget:
    """Wait until all actors have measured, then choose and write the choice."""
    config, tokens_per_batch = actor.config, welcome.tokens_per_batch
    first_drafter = actor.args.place - actor.index
    of_targets = range(first_drafter - config.num_targets, first_drafter)
    of_drafters = range(first_drafter, first_drafter + config.num_drafters)
    while True:
        targets, drafters = ([actor.board.read(index) for index in indices] for indices in (of_targets, of_drafters))
        if all(notice.tokens_per_s for notice in targets) and all(notice.max_anchors for notice in drafters):
            break
        _wait(actor)
    speeds = [notice.tokens_per_s for notice in targets]
    costs = [BatchCost(notice.seconds_per_batch, notice.seconds_per_anchor, notice.max_anchors) for notice in drafters]
    anchors = balanced_anchors(costs, sum(speeds) / tokens_per_batch, welcome.shapes, config)
    budget = AnchorBudget(anchors, tokens_per_batch, speeds, costs)
    write_budget(budget, actor.run_dir)
    mean = mean_anchors(anchors, welcome.shapes, config)
    taken = len(costs) * tokens_per_batch / max(cost.seconds + cost.seconds_per_anchor * mean for cost in costs)
    what = anchors, mean, sum(speeds), taken
    log.info("%d anchors a batch, %.0f on average: the targets make %.0f tokens/s, the drafters take %.0f", *what)
    return budget


def _wait(actor: Actor) -> None:
    actor.check_stop()
    actor.keep_waiting()
    time.sleep(_POLL_S)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
