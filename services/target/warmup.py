"""Warm-up of a target: load, tune and compile every kernel and make every buffer before the first lease.

On a GPU each shape of the plan runs once, largest first, so that later ones find their memory. Kernels of
flash-linear-attention tune themselves for each number of rows and each range of tokens in a batch: the lengths between are
run through the first layers only (compiled layers tune nothing by that range). On a CPU nothing is tuned: the smallest
shape runs.
"""

import gc
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from common.actor.messages import BatchShape
from common.config import PlanConfig
from common.data.padding import padded_lengths
from common.device.memory import GIB, allowed_bytes, describe_peak
from common.errors import ConfigError
from common.ring.layout import SlotLayout
from services.target.model import TargetModel
from services.target.rows import TargetRows, make_rows
from services.target.staging import Staging

NUM_STAGINGS = 2  # one is filled while the other is copied out
_STEP_TOKENS = 256
_RANGE_TOKENS = 512  # those kernels use ranges of 65,536 rows of a head, 1,365 tokens for 48 heads
_USED_PART = 0.97  # of the memory that is still free; fragments and the driver take the rest

log = logging.getLogger(__name__)


class WarmUp:
    """Makes the staging buffers of a target and runs the model once for every shape."""

    def __init__(self, model: TargetModel, layout: SlotLayout, plan: PlanConfig, device: torch.device) -> None:
        self._model = model
        self._layout = layout
        self._plan = plan
        self._device = device
        self._on_gpu = device.type == "cuda"

    def run(self, shapes: Sequence[BatchShape], check: Callable[[], None]) -> list[Staging]:
        """Return the staging buffers; `check` is called between two forwards and ends the warm-up by raising.

        Raises:
            ConfigError: the largest batch does not fit into the device's memory; the message names what would.
        """
        began = time.monotonic()
        chosen = sorted(shapes, key=lambda shape: shape.num_rows * shape.length, reverse=self._on_gpu)
        chosen = chosen if self._on_gpu else chosen[:1]
        stagings = self._try(self._layout, chosen, check)
        if stagings is None:
            raise self._refusal(check)
        between = shapes_between(chosen, self._plan.bucket_lengths) if self._on_gpu else []
        for shape in between:
            check()
            self._model.tune(stagings[0].upload(_make_rows(shape)))
        self._finish()
        took = f"{len(chosen)} shapes and {len(between)} between them in {time.monotonic() - began:.1f} s"
        log.info("warmed up %s%s", took, describe_peak(self._device))
        return stagings

    def _try(self, layout: SlotLayout, shapes: Sequence[BatchShape], check: Callable[[], None]) -> list[Staging] | None:
        """Make staging buffers and run the shapes; None if the memory does not suffice."""
        try:
            stagings = [Staging(layout, self._device) for _ in range(NUM_STAGINGS)]
            for shape in shapes:
                check()
                self._model.run(stagings[0].upload(_make_rows(shape)), stagings[0].keep)
                self._finish()
        except torch.OutOfMemoryError:
            return None
        return stagings

    def _finish(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize(self._device)

    def _refusal(self, check: Callable[[], None]) -> ConfigError:
        longest, found = self._plan.bucket_lengths[-1], self._plan.max_tokens_per_batch
        memory = f"of the {allowed_bytes(self._device) / GIB:.1f} GiB that this process may have on {self._device}"
        tokens = self._fitting_tokens(check)
        _free_cached_memory()
        if tokens < longest:
            return ConfigError(
                f"plan.bucket_lengths: needed rows of at most {tokens} tokens, all {memory}, found {longest}; "
                f"plan.max_tokens_per_batch can then be {tokens}"
            )
        return ConfigError(f"plan.max_tokens_per_batch: needed at most {tokens}, all {memory}, found {found}")

    def _fitting_tokens(self, check: Callable[[], None]) -> int:
        """Return the tokens of the largest batch that fits, extrapolated from small ones and then tried; 0 if none fits."""
        small, large = (self._peak_bytes(tokens) for tokens in (_STEP_TOKENS, 2 * _STEP_TOKENS))
        if small is None or large is None:
            return 0
        per_token = max(1.0, (large - small) / _STEP_TOKENS)
        room = max(0, allowed_bytes(self._device) - small) * _USED_PART
        tokens = _round_down(min(_STEP_TOKENS + room / per_token, self._plan.max_tokens_per_batch - 1))
        while tokens > 0 and self._peak_bytes(tokens) is None:
            check()
            tokens = _round_down(tokens * 0.95)
        return tokens

    def _peak_bytes(self, tokens: int) -> int | None:
        """Return the peak memory of a batch, with weights and staging, or None if it does not fit. It depends on B * S only."""
        _free_cached_memory()
        torch.cuda.reset_peak_memory_stats(self._device)
        layout = msgspec.structs.replace(self._layout, capacity_tokens=tokens)
        fits = self._try(layout, [BatchShape(tokens // _STEP_TOKENS, _STEP_TOKENS)], lambda: None) is not None
        return torch.cuda.max_memory_allocated(self._device) if fits else None


def shapes_between(shapes: Sequence[BatchShape], bucket_lengths: Sequence[int]) -> list[BatchShape]:
    """Return the largest batch of every range of tokens that a batch can have and none of `shapes` has.

    `shapes` are the longest rows of each bucket and number of rows; rows of a bucket are longer than the bound before it.
    """
    found = {shape.num_rows * shape.length // _RANGE_TOKENS for shape in shapes}
    between: list[BatchShape] = []
    for shape in shapes:
        shortest = max((bound for bound in bucket_lengths if bound < shape.length), default=0) + 1
        lengths = np.unique(padded_lengths(np.arange(shortest, shape.length + 1), bucket_lengths))
        for length in reversed(lengths.tolist()):
            tokens_range = shape.num_rows * length // _RANGE_TOKENS
            if tokens_range not in found:
                found.add(tokens_range)
                between.append(BatchShape(shape.num_rows, length))
    return between


def _make_rows(shape: BatchShape) -> TargetRows:
    tokens = [np.zeros(shape.length, np.int32)] * shape.num_rows
    return make_rows(tokens, tokens, range(shape.num_rows), shape.length)


def _free_cached_memory() -> None:  # of an attempt that failed
    gc.collect()
    torch.cuda.empty_cache()


def _round_down(tokens: float) -> int:
    return int(tokens) // _STEP_TOKENS * _STEP_TOKENS
