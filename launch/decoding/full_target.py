"""Load the whole target, later layers and head included, which no process of a run loads."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.config import Config
from common.errors import ModelError
from common.weights import EMBEDDING, HEAD, fill_random, read_initializer_range
from launch.data.generator import load_model
from services.target.architecture import find_layers
from services.target.linear_attention import choose_kernels


def load_full_target(config: Config, device: torch.device) -> PreTrainedModel:
    """Load the target of a run in `config.model.dtype` from its folder, or make the random one of the training.

    Raises:
        ModelError: the folder or its weights are missing or damaged, or a GPU lacks the kernels of a hybrid target.
    """
    target = load_plain_target(config, device)
    choose_kernels(target, device)
    return target


def load_plain_target(config: Config, device: torch.device) -> PreTrainedModel:
    """Load the target on the kernels that transformers chooses by itself; ModelError as `load_full_target`."""
    folder = Path(config.model.path).expanduser()
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    model: Any = _make_random(config, folder, device, dtype) if config.model.random_init else load_model(folder, device, dtype)
    target: PreTrainedModel = model.to(device, dtype).eval()
    find_layers(target.get_decoder())  # type: ignore[no-untyped-call]  # or it is refused
    return target


def stop_tokens(target: PreTrainedModel) -> set[int]:
    """Return the ids that end an answer by generation_config.json."""
    found = target.generation_config.eos_token_id if target.generation_config else None
    return {found} if isinstance(found, int) else set(found or ())


def _make_random(config: Config, folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """Make each parameter from the seed and its name inside the decoder, as services.target.loading does."""
    text_config = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
    try:
        with device:
            model: Any = AutoModelForCausalLM.from_config(text_config, dtype=dtype)  # type: ignore[no-untyped-call]
    except ValueError as error:
        line = str(error).partition("\n")[0].partition(" Model type should be")[0]
        raise ModelError(f"{folder}: a random target cannot be made whole: {line}") from error
    std, prefix = read_initializer_range(folder), f"{model.base_model_prefix}."
    own_names = {model.get_output_embeddings(): HEAD, model.get_input_embeddings(): EMBEDDING}
    for name, parameter in model.named_parameters():  # of a tied pair only the embedding
        module = model.get_submodule(name.rpartition(".")[0])
        own_name = own_names.get(module, name.removeprefix(prefix))
        fill_random(parameter.data, own_name, type(module).__name__, std, config.seed)
    return model
