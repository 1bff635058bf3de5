"""Load a target and its drafter for decoding: those of a run, or any two folders."""

from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from transformers import PreTrainedModel

from common.config import ActorsConfig, Config, DataConfig, ModelConfig, PlanConfig, TargetsConfig
from common.draft_config import DraftConfig
from common.errors import CheckpointError
from common.target_shape import TargetShape, read_target_shape
from common.typed_toml import DType
from launch.decoding.difference import check_cache
from launch.decoding.full_target import load_full_target
from services.drafter.folder.drafter_folder import Drafter, read_drafter, read_fitting_drafter
from services.drafter.model.model import DraftModel

_STATED = ("num_layers", "block_size", "mask_token_id", "tap_layers")  # the target cannot give these


class Pair(NamedTuple):
    """A target and a draft model on one device; `config` is that of the draft model."""

    target: PreTrainedModel
    draft: DraftModel
    config: DraftConfig


def load_pair(config: Config, drafter: Path, device: torch.device) -> Pair:
    """Load the target of `config` and the drafter of a folder, which must be that of `config`.

    Raises:
        HeadraceError: one of them is missing or damaged, they do not fit, or the cache of the target is wrong.
    """
    found = read_fitting_drafter(drafter, config)
    target = load_full_target(config, device)
    check_cache(target)
    return Pair(target, found.build(config).to(device), config.draft)


def with_dtype(config: Config, dtype: DType) -> Config:
    """Return `config` with both models in one type."""
    change = msgspec.structs.replace
    return change(config, model=change(config.model, dtype=dtype), draft=change(config.draft, dtype=dtype))


def config_of_folders(model: Path, drafter: Path, dtype: DType) -> Config:
    """Return the configuration of a target and a drafter that come from no run; gaps in the drafter are filled by the target.

    Raises:
        HeadraceError: a folder is missing or damaged, or the drafter lacks a setting that the target cannot give.
    """
    found, shape = read_drafter(drafter), read_target_shape(model)
    _check(found, shape.num_hidden_layers)
    draft = DraftConfig(
        mask_token_id=found.settings["mask_token_id"],
        layer_types=["full_attention"] * found.settings["num_layers"],
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        dtype=dtype,
    )
    return found.on(bare_config(ModelConfig(path=str(model), dtype=dtype), draft, shape))


def bare_config(model: ModelConfig, draft: DraftConfig, shape: TargetShape) -> Config:
    """Return the configuration of a target and a drafter, with nothing to train."""
    return Config(
        model=model,
        draft=draft,
        data=DataConfig(),
        plan=PlanConfig(bucket_lengths=[1], max_tokens_per_batch=1, batches_per_step=1),
        targets=TargetsConfig(devices=["cpu"]),
        drafters=ActorsConfig(devices=["cpu"]),
        target_shape=shape,
    )


def _check(found: Drafter, num_layers: int) -> None:
    if missing := [key for key in _STATED if found.settings.get(key) is None]:
        raise CheckpointError(f"{found.folder}: needed {', '.join(missing)} in config.json, found none")
    taps = found.settings["tap_layers"]
    if not taps or min(taps) < 0 or max(taps) >= num_layers:
        raise CheckpointError(f"{found.folder}: tap_layers: needed layers from 0 to {num_layers - 1}, found {taps}")
