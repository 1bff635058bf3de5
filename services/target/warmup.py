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
from services.target.stages import Stage, count_layer_bytes, split
from services.target.staging import Staging

_STEP_TOKENS = 256
_RANGE_TOKENS = 512  # those kernels use ranges of 65,536 rows of a head, 1,365 tokens for 48 heads
_USED_PART = 0.97  # of the memory that is still free; fragments and the driver take the rest

log = logging.getLogger(__name__)


class WarmUp:
    """Makes the staging buffers of a target and runs the model once for every shape."""

    def __init__(self, model: TargetModel, layout: SlotLayout, plan: PlanConfig) -> None:
        self._model = model
        self._layout = layout
        self._plan = plan
        self._devices = [stage.device for stage in model.stages]
        self._on_gpu = self._devices[0].type == "cuda"

    def run(self, shapes: Sequence[BatchShape], check: Callable[[], None]) -> list[Staging]:
        """Return the staging buffers; `check` is called between two forwards and ends the warm-up by raising.

        Raises:
            ConfigError: the largest batch does not fit into the device's memory; the message names what would.
        """
        began = time.monotonic()
        chosen = sorted(shapes, key=lambda shape: shape.num_rows * shape.length, reverse=self._on_gpu)
        chosen = chosen if self._on_gpu else chosen[:1]
        if len(self._devices) > 1 and chosen:
            self._balance(chosen[0])
        stagings = self._try(self._layout, chosen, check)
        if stagings is None:
            raise self._refusal(check)
        between = shapes_between(chosen, self._plan.bucket_lengths) if self._on_gpu else []
        for shape in between:
            check()
            self._model.tune(stagings[0].upload(_make_rows(shape)))
        self._model.synchronize()
        took = f"{len(chosen)} shapes and {len(between)} between them in {time.monotonic() - began:.1f} s"
        log.info("warmed up %s%s", took, "".join(map(describe_peak, self._devices)))
        return stagings

    def _try(self, layout: SlotLayout, shapes: Sequence[BatchShape], check: Callable[[], None]) -> list[Staging] | None:
        """Make staging buffers and run the shapes; None if the memory does not suffice."""
        try:
            stagings = [Staging(layout, self._model.stages) for _ in range(len(self._devices) + 1)]
            for shape in shapes:
                check()
                self._model.run(stagings[0].upload(_make_rows(shape)), stagings[0].keep, stagings[0].enter)
                self._model.synchronize()
        except torch.OutOfMemoryError:
            return None
        return stagings

    def _balance(self, shape: BatchShape) -> None:
        """Cut the stages anew, by the time that each layer needs for this shape, and within the memory that it leaves."""
        tokens = np.random.default_rng(0).integers(0, self._model.vocab_size, (shape.num_rows, shape.length))
        input_ids, weights = torch.from_numpy(tokens).to(self._devices[0]), count_layer_bytes(self._model.decoder)
        if self._on_gpu:
            self._reset_peaks()
        try:
            for _ in range(2):  # the first one tunes and compiles
                seconds = self._model.time_layers(input_ids)
        except torch.OutOfMemoryError:
            return  # refused by the caller
        if first_layers := split(seconds, weights, [self._room(stage, weights) for stage in self._model.stages]):
            self._model.assign(self._devices, first_layers)
            _free_cached_memory()
        for stage in self._model.stages:
            stage_s = sum(seconds[layer] for layer in stage.layers)
            log.info("%s: %d layers, %.1f ms of %s tokens", stage.device, len(stage.layers), stage_s * 1e3, input_ids.numel())

    def _room(self, stage: Stage, weights: Sequence[int]) -> float:
        """Return the bytes for layers on a stage's device, beside the forward that was run and the staging buffers."""
        if not self._on_gpu:
            return float("inf")
        buffers = self._layout.hidden_bytes(self._layout.capacity_tokens) * (len(self._devices) + 1)
        others = torch.cuda.max_memory_allocated(stage.device) - sum(weights[layer] for layer in stage.layers)
        return allowed_bytes(stage.device) * _USED_PART - others - buffers

    def _refusal(self, check: Callable[[], None]) -> ConfigError:
        longest, found = self._plan.bucket_lengths[-1], self._plan.max_tokens_per_batch
        each = " and ".join(f"{allowed_bytes(device) / GIB:.1f} GiB on {device}" for device in self._devices)
        memory = f"of the {each} that this process may have"
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
        small, large = (self._peaks_bytes(tokens) for tokens in (_STEP_TOKENS, 2 * _STEP_TOKENS))
        if small is None or large is None:
            return 0
        fitting = [
            _STEP_TOKENS + max(0, allowed_bytes(device) - less) * _USED_PART / max(1.0, (more - less) / _STEP_TOKENS)
            for device, less, more in zip(self._devices, small, large, strict=True)
        ]
        tokens = _round_down(min(*fitting, self._plan.max_tokens_per_batch - 1))
        while tokens > 0 and self._peaks_bytes(tokens) is None:
            check()
            tokens = _round_down(tokens * 0.95)
        return tokens

    def _peaks_bytes(self, tokens: int) -> list[int] | None:
        """Return each device's peak of a batch with weights and staging, or None if it does not fit. It depends on B * S."""
        _free_cached_memory()
        self._reset_peaks()
        layout = msgspec.structs.replace(self._layout, capacity_tokens=tokens)
        fits = self._try(layout, [BatchShape(tokens // _STEP_TOKENS, _STEP_TOKENS)], lambda: None) is not None
        return [torch.cuda.max_memory_allocated(device) for device in self._devices] if fits else None

    def _reset_peaks(self) -> None:
        for device in self._devices:
            torch.cuda.reset_peak_memory_stats(device)


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
