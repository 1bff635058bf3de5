"""Which values the settings may have, alone and together."""

import math
import re
from typing import TYPE_CHECKING

import msgspec

from common.errors import ConfigError

if TYPE_CHECKING:
    from common.config import ActorsConfig, Config, DraftConfig, PlanConfig
    from common.target_shape import TargetShape

_DEVICE = re.compile(r"cpu|cuda:\d+")


def check(config: "Config") -> None:
    """Raise ConfigError for the first value that cannot be; the message names the key."""
    _check_finite(msgspec.to_builtins(config), "")
    _check_actors(config.targets, "targets")
    compiles = not config.targets.compile or "cpu" not in config.targets.devices
    _need(compiles, "targets.compile", "false for targets on a CPU", "true")
    _check_actors(config.drafters, "drafters")
    _check_draft(config.draft, config.shape)
    _check_plan(config.plan, config.num_drafters)
    train, checkpoint, data = config.train, config.checkpoint, config.data
    samples = config.plan.max_samples_per_batch
    _need(config.ring.num_slots >= 1, "ring.num_slots", "at least 1", config.ring.num_slots)
    _need(bool(data.path) != (data.synthetic is not None), "data", "either data.path or data.synthetic", "both or neither")
    named = [bool(data.eval_path), bool(data.eval_paths), data.synthetic is not None]
    _need(sum(named) <= 1, "data", "one of data.eval_path, data.eval_paths and data.synthetic", f"{sum(named)} of them")
    for name, path in data.eval_paths.items():
        _need(bool(name and path), "data.eval_paths", "names and folders", f"{name!r} = {path!r}")
    _need(train.anchors_per_document >= 1, "train.anchors_per_document", "at least 1", train.anchors_per_document)
    fits = train.anchors_per_batch >= samples
    _need(fits, "train.anchors_per_batch", f"at least plan.max_samples_per_batch {samples}", train.anchors_per_batch)
    divisible = config.shape.vocab_size % 16 == config.shape.hidden_size % 16 == 0
    _need(train.head == "exact" or divisible, "train.head", "vocabulary and hidden size divisible by 16 for fp8", train.head)
    _need(train.decay_gamma > 0, "train.decay_gamma", "above 0", train.decay_gamma)
    window = train.profile_steps
    _need(not window or (len(window) == 2 and 1 <= window[0] <= window[1]), "train.profile_steps", "[first, last]", window)
    _need(checkpoint.every_steps >= 1, "checkpoint.every_steps", "at least 1", checkpoint.every_steps)
    deaths = config.supervision.max_deaths_without_progress
    _need(deaths >= 1, "supervision.max_deaths_without_progress", "at least 1", deaths)
    _need(checkpoint.keep >= 1, "checkpoint.keep", "at least 1", checkpoint.keep)


def _check_finite(value: object, key: str) -> None:
    """TOML knows inf and nan; no setting may be either."""
    if isinstance(value, dict):
        for name, inner in value.items():
            _check_finite(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, float):
        _need(math.isfinite(value), key, "a finite number", value)


def _check_actors(actors: "ActorsConfig", key: str) -> None:
    _need(bool(actors.devices), f"{key}.devices", "at least one device", "none")
    for device in actors.devices:
        _need(_DEVICE.fullmatch(device) is not None, f"{key}.devices", "cpu or cuda:N", device)
    _need(actors.num_threads >= 1, f"{key}.num_threads", "at least 1", actors.num_threads)


def _check_draft(draft: "DraftConfig", shape: "TargetShape") -> None:
    taps, heads, groups = draft.tap_layers, draft.num_attention_heads, draft.num_key_value_heads
    sliding = "sliding_attention" in draft.layer_types
    _need(draft.num_layers >= 1, "draft.num_layers", "at least 1", draft.num_layers)
    _need(draft.block_size >= 2, "draft.block_size", "at least 2", draft.block_size)
    known = 0 <= draft.mask_token_id < shape.vocab_size
    _need(known, "draft.mask_token_id", f"an id below the vocabulary size {shape.vocab_size}", draft.mask_token_id)
    ascending = taps == sorted(set(taps)) and taps[0] >= 0 and taps[-1] < shape.num_hidden_layers
    _need(ascending, "draft.tap_layers", f"ascending from 0 to {shape.num_hidden_layers - 1}", taps)
    _need(len(draft.layer_types) == draft.num_layers, "draft.layer_types", f"{draft.num_layers} entries", draft.layer_types)
    _need(not sliding or draft.sliding_window >= 1, "draft.sliding_window", "at least 1", draft.sliding_window)
    wide = draft.intermediate_size
    _need(wide >= 1, "draft.intermediate_size", "at least 1, for config.json of the target names none", wide)
    _need(heads % groups == 0, "draft.num_attention_heads", f"a multiple of num_key_value_heads {groups}", heads)


def _check_plan(plan: "PlanConfig", num_drafters: int) -> None:
    buckets = plan.bucket_lengths
    ascending = bool(buckets) and buckets == sorted(set(buckets)) and buckets[0] >= 1
    _need(ascending, "plan.bucket_lengths", "ascending lengths", buckets)
    fits = plan.max_tokens_per_batch >= buckets[-1]
    _need(fits, "plan.max_tokens_per_batch", f"room for the longest bucket {buckets[-1]}", plan.max_tokens_per_batch)
    _need(plan.max_samples_per_batch >= 1, "plan.max_samples_per_batch", "at least 1", plan.max_samples_per_batch)
    shared = plan.batches_per_step >= 1 and plan.batches_per_step % num_drafters == 0
    _need(shared, "plan.batches_per_step", f"a multiple of the {num_drafters} drafters", plan.batches_per_step)
    _need(plan.epochs >= 1, "plan.epochs", "at least 1", plan.epochs)


def _need(holds: bool, key: str, needed: str, found: object) -> None:
    if not holds:
        raise ConfigError(f"{key}: needed {needed}, found {found}")
