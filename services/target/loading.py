"""A target's decoder in the memory of its device: read from its folder, or made from the seed.

The loader of transformers maps the files, so the targets of a node share their pages; it reads only tensors that the cut
decoder has, and copies each from the mapping straight to the device. Buffers that no file holds, such as inv_freq, are
computed on the device.
"""

import contextlib
import logging
import re
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.hooks import remove_hook_from_submodules
from safetensors import SafetensorError
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.config import Config
from common.device.memory import allowed_bytes
from common.errors import ModelError
from common.target_limits import refuse_quantized
from common.weights import EMBEDDING, fill_random, find_embedding, find_quantized, locate_tensors, read_initializer_range
from services.target.linear_attention import choose_kernels
from services.target.stages import count_layer_bytes, split_by_bytes

log = logging.getLogger(__name__)

_GIB = 2**30
_NUM_NAMED = 3  # tensors in an error


def load_decoder(config: Config, devices: Sequence[torch.device]) -> tuple[PreTrainedModel, list[int]]:
    """Load the embedding and the layers up to the last tap of `config.model.path`; with random_init, make them.

    Returns:
        The decoder, and the first layer of each device. Layers lie on their devices, or all on the first if they were made.
    """
    device = devices[0]
    logging.getLogger("transformers").setLevel(logging.ERROR)  # or it reports the layers left out on purpose
    disable_progress_bar()  # type: ignore[no-untyped-call]
    began = time.monotonic()
    folder, num_layers = Path(config.model.path).expanduser(), config.draft.tap_layers[-1] + 1
    text_config = _read_text_config(folder)
    what = text_config.model_type, num_layers, text_config.num_hidden_layers, time.monotonic() - began
    log.info("architecture %s, %d of %d layers, its code imported in %.1f s", *what)
    _cut(text_config, num_layers)
    began = time.monotonic()
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    first_layers, device_map = _assign(text_config, dtype, devices)
    if config.model.random_init:
        decoder = _make_random(text_config, read_initializer_range(folder), config.seed, device, dtype)
    else:
        decoder = _read(folder, text_config, device_map, dtype)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    num_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    how = "made" if config.model.random_init else "read"
    where = "+".join(map(str, devices))
    log.info("weights %s in %.1f s: %.2f GiB on %s", how, time.monotonic() - began, num_bytes / _GIB, where)
    choose_kernels(decoder, device)
    return decoder, first_layers


def _assign(
    text_config: PretrainedConfig, dtype: torch.dtype, devices: Sequence[torch.device]
) -> tuple[list[int], dict[str, torch.device]]:
    """Return the first layer of each device, and the device of each module by name; what is no layer lies on the first."""
    if len(devices) == 1:
        return [0], {"": devices[0]}
    with torch.device("meta"):
        decoder: Any = AutoModel.from_config(text_config, dtype=dtype)  # type: ignore[no-untyped-call]
    if not hasattr(decoder, "layers"):
        return [0], {"": devices[0]}  # refused by the caller
    rooms = [allowed_bytes(device) if device.type == "cuda" else float("inf") for device in devices]
    first_layers = split_by_bytes(count_layer_bytes(decoder), devices, rooms)
    device_map = {name: devices[0] for name, _ in decoder.named_children() if name != "layers"}
    for layer in range(len(decoder.layers)):
        device_map[f"layers.{layer}"] = devices[bisect_right(first_layers, layer) - 1]
    return first_layers, device_map


def _read_text_config(folder: Path) -> PretrainedConfig:
    """Read the configuration of the text decoder, also from inside the wrapper of a multimodal model.

    Its code is imported here, so that the log shows the time of that apart: seconds for the kernels of a hybrid model.
    """
    if not (folder / "config.json").is_file():
        raise ModelError(f"model.path: needed a model folder with config.json, found none in {folder}")
    try:
        text_config: PretrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config(decoder=True)
    except (ValueError, OSError, KeyError) as error:
        raise ModelError(f"{folder}: needed an architecture that transformers knows, found: {_first_line(error)}") from error
    try:
        MODEL_MAPPING[type(text_config)]
    except KeyError as error:
        raise ModelError(f"{text_config.model_type}: needed a decoder that transformers can make, found none") from error
    return text_config


def _cut(text_config: PretrainedConfig, num_layers: int) -> None:
    text_config.num_hidden_layers = num_layers
    if getattr(text_config, "layer_types", None):
        with contextlib.suppress(AttributeError):  # Bamba and Falcon-H1 derive it from the number of layers
            text_config.layer_types = text_config.layer_types[:num_layers]


def _read(
    folder: Path, text_config: PretrainedConfig, device_map: dict[str, torch.device], dtype: torch.dtype
) -> PreTrainedModel:
    refuse_quantized(folder)
    prefix = find_embedding(folder).removesuffix(EMBEDDING)
    try:
        decoder: PreTrainedModel
        decoder, report = AutoModel.from_pretrained(
            folder,
            config=text_config,
            dtype=dtype,
            device_map=device_map,
            attn_implementation="sdpa",
            key_mapping={f"^{re.escape(prefix)}": ""},
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
        )
    except (ValueError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(f"{folder}: {text_config.model_type} cannot be loaded: {_first_line(error)}") from error
    remove_hook_from_submodules(decoder)  # of accelerate, where there are several devices: they move tensors and wait
    if report["missing_keys"]:
        raise ModelError(f"{folder}: needed the tensors {', '.join(sorted(report['missing_keys']))}, found none of them")
    _check_all_used(folder, report["unexpected_keys"], text_config.num_hidden_layers)
    _check_types(folder, prefix, decoder)
    return decoder


def _check_all_used(folder: Path, unexpected: set[str], num_layers: int) -> None:
    """Raise ModelError for a tensor that belongs to what was loaded but that the decoder has no room for, such as a scale."""
    parts = ("embed_tokens.", *(f"layers.{layer}." for layer in range(num_layers)))
    unknown = sorted(name for name in unexpected if name.startswith(parts))
    if unknown:
        raise ModelError(f"{folder}: needed tensors that the decoder knows, found {_shorten(unknown)} (quantized weights?)")


def _check_types(folder: Path, prefix: str, decoder: PreTrainedModel) -> None:
    """Raise ModelError for a weight that was read as a plain number but is an integer or a float8 in its file."""
    parts = (f"{prefix}embed_tokens.", *(f"{prefix}layers.{layer}." for layer in range(len(decoder.layers))))  # type: ignore[arg-type]
    integers = {name for name, buffer in decoder.named_buffers() if not buffer.is_floating_point()}
    files = {name: file for name, file in locate_tensors(folder).items() if name.startswith(parts)}
    quantized = find_quantized({name: file for name, file in files.items() if name.removeprefix(prefix) not in integers})
    if quantized:
        raise ModelError(f"{folder}: needed weights of 16 bits or more, found integers or float8 in {_shorten(quantized)}")


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"{', '.join(names[:_NUM_NAMED])}{more}"


def _make_random(
    text_config: PretrainedConfig, std: float, seed: int, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Make each parameter from the seed and its own name; the model computes buffers such as inv_freq."""
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
