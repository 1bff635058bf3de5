"""The whole target, later layers and head included: what the drafter's process never loads, and decoding needs."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.config import Config
from common.errors import ModelError
from common.weights import fill_random, read_initializer_range
from launch.data.generator import load_model
from services.target.linear_attention import choose_kernels


def load_full_target(config: Config, device: torch.device) -> PreTrainedModel:
    """The target of a run in `config.model.dtype`: read from its folder, or the same random one as in training.

    Raises:
        ModelError: the folder or its weights are missing or damaged, or a GPU lacks the kernels of a hybrid target.
    """
    target = load_plain_target(config, device)
    choose_kernels(target, device)
    return target


def load_plain_target(config: Config, device: torch.device) -> PreTrainedModel:
    """As `load_full_target`, on whatever kernels transformers finds by itself.

    Raises:
        ModelError: the folder or its weights are missing or damaged, or the architecture cannot be tapped.
    """
    folder = Path(config.model.path).expanduser()
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    model: Any = _make_random(config, folder, device, dtype) if config.model.random_init else load_model(folder, device)
    target: PreTrainedModel = model.to(device, dtype).eval()
    decoder = target.get_decoder()  # type: ignore[no-untyped-call]
    if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        raise ModelError(f"{folder}: needed a decoder with a list `layers`, found {type(decoder).__name__}")
    return target


def stop_tokens(target: PreTrainedModel) -> set[int]:
    """The ids that end an answer of this target; none for a model that was never told."""
    found = target.generation_config.eos_token_id if target.generation_config else None
    if found is None:
        return set()
    return {found} if isinstance(found, int) else set(found)


def _make_random(config: Config, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Each parameter from the seed and its name inside the decoder, as services.target.model makes it."""
    text_config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
    with device:
        model: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            text_config, dtype=dtype, attn_implementation="sdpa"
        )
    std, prefix = read_initializer_range(folder), f"{model.base_model_prefix}."
    for name, parameter in model.named_parameters():  # of a tied pair only the embedding
        module = model.get_submodule(name.rpartition(".")[0])
        fill_random(parameter.data, name.removeprefix(prefix), type(module).__name__, std, config.seed)
    return model
