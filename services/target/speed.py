"""Speed of a target in tokens per second, measured once after the warm-up if the anchor budget depends on it."""

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from common.actor.messages import BatchShape
from services.target.model import TargetModel
from services.target.rows import make_rows
from services.target.staging import Staging

log = logging.getLogger(__name__)


def measure_speed(
    model: TargetModel, staging: Staging, shapes: Sequence[BatchShape], device: torch.device, check: Callable[[], None]
) -> float:
    """Return tokens per second over an epoch's batches of these shapes, forward and packing; copies run beside them.

    The tokens are random: a GPU computes faster with constant ones, so the measurement would promise too much.

    Args:
        model: warmed up.
        staging: of full capacity.
        shapes: those of the plan, with the number of batches of each.
        device: the model's.
        check: called between two forwards; ends the measurement by raising.
    """
    num_tokens, taken_s, random = 0, 0.0, np.random.default_rng(0)
    for shape in (shape for shape in shapes if shape.num_batches):
        check()
        tokens = random.integers(0, model.vocab_size, (shape.num_rows, shape.length), np.int32)
        rows = make_rows(list(tokens), list(tokens), range(shape.num_rows), shape.length)
        _synchronize(device)
        began = time.perf_counter()
        model.run(staging.upload(rows), staging.keep)
        _synchronize(device)
        num_tokens += shape.num_batches * shape.num_rows * shape.length
        taken_s += shape.num_batches * (time.perf_counter() - began)
    speed = num_tokens / taken_s if taken_s else 0.0
    log.info("makes %.0f tokens/s", speed)
    return speed


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
