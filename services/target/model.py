"""The frozen target: a decoder cut off after its last tapped layer.

B rows, S padded length, H hidden size, K taps, V vocabulary.
"""

import logging
import re
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.config import Config
from common.errors import ModelError
from common.weights import fill_random, find_tensor, read_initializer_range
from services.target.capture import Capture


class TargetModel:
    """Hidden states of the tapped layers. Rows are right-padded; causal layers need no mask for that."""

    def __init__(self, decoder: PreTrainedModel, tap_layers: list[int]) -> None:
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, nn.ModuleList):
            raise ModelError(f"model.path: needed a decoder with a list `layers`, found {type(decoder).__name__}")
        decoder.train(False).requires_grad_(False)
        decoder.norm = nn.Identity()  # nobody reads what follows the last tap
        self.decoder = decoder
        self._capture = Capture(layers, tap_layers)

    @classmethod
    def load(cls, config: Config, device: torch.device) -> "TargetModel":
        """Load `config.model.path`, or make it from the seed, on `device`.

        Only the embedding and the layers up to the last tap are there: later layers and the head are not read.

        Raises:
            ModelError: the folder or its weights are missing or damaged, or the architecture is not supported.
        """
        logging.getLogger("transformers").setLevel(logging.ERROR)  # or it reports the layers left out on purpose
        disable_progress_bar()  # type: ignore[no-untyped-call]
        folder = Path(config.model.path).expanduser()
        text_config = _cut(_read_text_config(folder), config.draft.tap_layers[-1] + 1)
        dtype: torch.dtype = getattr(torch, config.model.dtype)
        if config.model.random_init:
            decoder = _make_random(text_config, read_initializer_range(folder), config.seed, device, dtype)
        else:
            decoder = _read(folder, text_config, device, dtype)
        return cls(decoder, config.draft.tap_layers)

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor) -> list[torch.Tensor]:
        """int64 [B, S] -> K tensors [B, S, H] in the model's dtype, one per tap in ascending order.

        What stands after a row's real tokens changes nothing before it, so the padding may hold any id.
        """
        self.decoder(input_ids=input_ids, use_cache=False)
        return self._capture.take()


def _read_text_config(folder: Path) -> PretrainedConfig:
    """The configuration of the text decoder, looked up inside the wrapper of a multimodal model."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: needed a model folder with config.json, found none in {folder}")
    try:
        text_config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
        return text_config
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"{folder}: needed an architecture that transformers knows, found: {_first_line(error)}") from error


def _cut(text_config: PretrainedConfig, num_layers: int) -> PretrainedConfig:
    text_config.num_hidden_layers = num_layers
    if getattr(text_config, "layer_types", None):
        text_config.layer_types = text_config.layer_types[:num_layers]
    return text_config


def _read(folder: Path, text_config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    prefix = find_tensor(folder, "embed_tokens.weight").removesuffix("embed_tokens.weight")
    try:
        decoder: PreTrainedModel
        decoder, report = AutoModel.from_pretrained(
            folder,
            config=text_config,
            dtype=dtype,
            device_map={"": device},
            attn_implementation="sdpa",
            key_mapping={f"^{re.escape(prefix)}": ""},
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
        )
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(f"{folder}: {text_config.model_type} cannot be loaded: {_first_line(error)}") from error
    if report["missing_keys"]:
        raise ModelError(f"{folder}: needed the tensors {', '.join(sorted(report['missing_keys']))}, found none of them")
    return decoder


def _make_random(
    text_config: PretrainedConfig, std: float, seed: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Each parameter from the seed and its own name; buffers, such as inv_freq, as the model computes them."""
    with device:
        decoder: PreTrainedModel = AutoModel.from_config(  # type: ignore[no-untyped-call]
            text_config, dtype=dtype, attn_implementation="sdpa"
        )
    for path, module in decoder.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            fill_random(parameter.data, name, type(module).__name__, std, seed)
    return decoder


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
