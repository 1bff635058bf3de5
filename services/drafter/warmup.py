"""The first steps of a drafter on a GPU: every kernel compiled, loaded or tuned before the first batch, or why that cannot be.

Kernels are made and chosen for numbers of rows, those of documents' tokens and of blocks: so made-up batches run from the
fullest down, each of half as many tokens as the one before. The first takes the memory that all later ones use.
"""

import gc
import logging
import time
from collections.abc import Callable

import torch

from common.config import Config
from common.device_memory import describe_peak
from common.errors import ConfigError
from services.drafter.anchors import anchors_of_tiles
from services.drafter.budget import measure_cost, with_anchors
from services.drafter.trainee import Trainee, full_shape, make_up_batch

log = logging.getLogger(__name__)


def warm_up(trainee: Trainee, config: Config, check: Callable[[], None]) -> None:
    """Whole steps that change no bit of the trainee.

    Args:
        trainee: with everything beside it that the device has to hold.
        config: the number of anchors is settled.
        check: called before every step; ends the warm-up by raising.

    Raises:
        ConfigError: a full batch does not fit into the device's memory; the message says what would.
    """
    began, shapes = time.monotonic(), halved_shapes(config)
    if not _fits(trainee, config, check):
        raise _refusal(trainee, config, check)
    log.info("warmed up %d sizes of a batch in %.1f s%s", len(shapes), time.monotonic() - began, describe_peak(trainee.device))


def halved_shapes(config: Config) -> list[tuple[int, int]]:
    """Documents and their length: a full batch, then half as many tokens each time, down to one block."""
    num_documents, length = full_shape(config)
    shapes = []
    while length >= config.draft.block_size:
        shapes.append((num_documents, length))
        num_documents, length = (num_documents // 2, length) if num_documents > 1 else (1, length // 2)
    return shapes


def _fits(trainee: Trainee, config: Config, check: Callable[[], None]) -> bool:
    """Run every size once, fullest first; return False where the memory does not suffice."""
    try:
        for shape in halved_shapes(config):
            check()
            trainee.rehearse_batch(make_up_batch(*shape, config, trainee.device), config)
            trainee.rehearse_step()
        if trainee.device.type == "cuda":
            torch.cuda.synchronize(trainee.device)
    except torch.OutOfMemoryError:
        return False
    return True


def _refusal(trainee: Trainee, config: Config, check: Callable[[], None]) -> ConfigError:
    memory = f"for all that a step takes to fit into the memory of {trainee.device}"
    anchors = _fitting_anchors(trainee, config, check)
    if anchors == 0:
        tokens = config.plan.max_tokens_per_batch
        return ConfigError(f"plan.max_tokens_per_batch: needed fewer tokens {memory}, whatever the anchors, found {tokens}")
    return ConfigError(f"train.anchors_per_batch: needed at most {anchors} {memory}, found {config.num_anchors}")


def _fitting_anchors(trainee: Trainee, config: Config, check: Callable[[], None]) -> int:
    """Return the largest number of anchors whose whole warm-up passes, or 0 where none does.

    The first candidate is extrapolated from what small budgets take. Each candidate starts from an empty cache, as it will
    in a process of its own.
    """
    step = anchors_of_tiles(config.draft.block_size)
    _make_room(trainee)
    try:
        anchors = min(measure_cost(trainee, config).max_anchors, config.num_anchors - 1) // step * step
        _make_room(trainee)
        while anchors and not _fits(trainee, with_anchors(config, anchors), check):
            _make_room(trainee)
            anchors = int(anchors * 0.95) // step * step
    except torch.OutOfMemoryError:
        return 0
    finally:
        _make_room(trainee)
    return anchors


def _make_room(trainee: Trainee) -> None:
    """Free what a failed try left behind."""
    trainee.optimizer.gradients.abandon()
    gc.collect()
    torch.cuda.empty_cache()
