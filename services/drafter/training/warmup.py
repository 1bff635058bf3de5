"""Warm-up of a drafter on a GPU: compile, load and tune every kernel before the first batch, or refuse a batch too large.

Kernels are compiled and chosen by the number of rows, of tokens and of blocks. So made-up batches run from the fullest
down, each with half as many tokens as the one before. The first allocates the memory that all later ones use.
"""

import gc
import logging
import time
from collections.abc import Callable

import torch

from common.config import Config
from common.device.memory import describe_peak
from common.errors import ConfigError
from services.drafter.model.anchors import anchors_of_tiles
from services.drafter.training.budget import measure_cost, with_anchors
from services.drafter.training.training_state import TrainingState, full_shape, make_up_batch

log = logging.getLogger(__name__)


def warm_up(state: TrainingState, config: Config, check: Callable[[], None]) -> None:
    """Run complete training steps without changing weights or optimizer state.

    Everything else that the device has to hold must be allocated already. `check` is called before every step, and ends
    the warm-up by raising.

    Raises:
        ConfigError: a full batch does not fit into the device's memory; the message says what would.
    """
    began, shapes = time.monotonic(), halved_shapes(config)
    if not _fits(state, config, check):
        raise _refusal(state, config, check)
    log.info("warmed up %d sizes of a batch in %.1f s%s", len(shapes), time.monotonic() - began, describe_peak(state.device))


def halved_shapes(config: Config) -> list[tuple[int, int]]:
    """Return numbers of documents and their length: a full batch, then half as many tokens each time, down to one block."""
    num_documents, length = full_shape(config)
    shapes = []
    while length >= config.draft.block_size:
        shapes.append((num_documents, length))
        num_documents, length = (num_documents // 2, length) if num_documents > 1 else (1, length // 2)
    return shapes


def _fits(state: TrainingState, config: Config, check: Callable[[], None]) -> bool:
    """Run every size once, fullest first; return False if the memory does not suffice."""
    try:
        for shape in halved_shapes(config):
            check()
            state.rehearse_batch(make_up_batch(*shape, config, state.device), config)
            state.rehearse_step()
        if state.device.type == "cuda":
            torch.cuda.synchronize(state.device)
    except torch.OutOfMemoryError:
        return False
    return True


def _refusal(state: TrainingState, config: Config, check: Callable[[], None]) -> ConfigError:
    memory = f"for all that a step takes to fit into the memory of {state.device}"
    anchors = _fitting_anchors(state, config, check)
    if anchors == 0:
        tokens = config.plan.max_tokens_per_batch
        return ConfigError(f"plan.max_tokens_per_batch: needed fewer tokens {memory}, whatever the anchors, found {tokens}")
    return ConfigError(f"train.anchors_per_batch: needed at most {anchors} {memory}, found {config.num_anchors}")


def _fitting_anchors(state: TrainingState, config: Config, check: Callable[[], None]) -> int:
    """Return the largest number of anchors whose complete warm-up fits, or 0 if none does.

    The first candidate is extrapolated from the memory of small budgets. Each candidate starts from an empty cache, as it
    will in a process of its own.
    """
    step = anchors_of_tiles(config.draft.block_size)
    _make_room(state)
    try:
        anchors = min(measure_cost(state, config).max_anchors, config.num_anchors - 1) // step * step
        _make_room(state)
        while anchors and not _fits(state, with_anchors(config, anchors_per_batch=anchors), check):
            _make_room(state)
            anchors = int(anchors * 0.95) // step * step
    except torch.OutOfMemoryError:
        return 0
    finally:
        _make_room(state)
    return anchors


def _make_room(state: TrainingState) -> None:
    """Free the memory of a failed try."""
    state.optimizer.gradients.abandon()
    gc.collect()
    torch.cuda.empty_cache()
