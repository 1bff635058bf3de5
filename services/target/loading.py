"""A target's decoder in the memory of its device: read from its folder, or made from the seed.

The loader of transformers maps the files, so the targets of a node share their pages; it reads only tensors that the cut
decoder has, and copies each from the mapping straight to the device. Buffers that no file holds, such as inv_freq, are
computed on the device.
"""

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
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.config import Config
from common.decoder_config import read_text_config
from common.device.memory import allowed_bytes
from common.errors import ModelError
from common.quantized_weights import find_consumed
from common.target_shape import read_target_config
from common.weights import (
    EMBEDDING,
    fill_random,
    find_decoder,
    find_quantized,
    is_loaded,
    locate_tensors,
    read_initializer_range,
)
from services.target.architecture import attention_of, find_layers, make_cut_class
from services.target.checkpoint import load_pretrained
from services.target.fp8_linear import quantize_linears, require_fp8, use_stored_numbers
from services.target.linear_attention import choose_kernels
from services.target.stages import count_layer_bytes, split_by_bytes

log = logging.getLogger(__name__)

_GIB = 2**30
_NUM_NAMED = 3  # tensors in an error
_FINAL_NORM = "norm.weight"  # never run, and renamed by mistake in transformers' files of DeepSeek-V4


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
    text_config = read_text_config(folder)
    cut = make_cut_class(text_config, num_layers)
    what = text_config.model_type, num_layers, text_config.num_hidden_layers, time.monotonic() - began
    log.info("architecture %s, %d of %d layers, its code imported in %.1f s", *what)
    began = time.monotonic()
    dtype: torch.dtype = getattr(torch, config.model.dtype)
    first_layers, device_map = _assign(cut, text_config, dtype, devices)
    if config.model.random_init:
        decoder = _make_random(cut, text_config, read_initializer_range(folder), config.seed, device, dtype)
    else:
        decoder = _read(folder, cut, text_config, device_map, dtype)
    if config.targets.precision == "checkpoint":
        _use_fp8(decoder, folder, config.model.random_init, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    num_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    how = "made" if config.model.random_init else "read"
    where = "+".join(map(str, devices))
    log.info("weights %s in %.1f s: %.2f GiB on %s", how, time.monotonic() - began, num_bytes / _GIB, where)
    choose_kernels(decoder, device)
    return decoder, first_layers


def _assign(
    cut: type[PreTrainedModel], text_config: PretrainedConfig, dtype: torch.dtype, devices: Sequence[torch.device]
) -> tuple[list[int], dict[str, torch.device]]:
    """Return the first layer of each device, and the device of each module by name; what is no layer lies on the first."""
    if len(devices) == 1:
        return [0], {"": devices[0]}
    with torch.device("meta"):
        decoder: Any = cut(text_config)
        decoder.to(dtype)
    layers = find_layers(decoder).layers
    rooms = [allowed_bytes(device) if device.type == "cuda" else float("inf") for device in devices]
    first_layers = split_by_bytes(count_layer_bytes(decoder), devices, rooms)
    path = next(path for path, module in decoder.named_modules() if module is layers)
    device_map = {name: devices[0] for name, _ in decoder.named_parameters() if not name.startswith(f"{path}.")}
    device_map |= {name: devices[0] for name, _ in decoder.named_buffers() if not name.startswith(f"{path}.")}
    for layer in range(len(layers)):
        device_map[f"{path}.{layer}"] = devices[bisect_right(first_layers, layer) - 1]
    return first_layers, device_map


def _read(
    folder: Path,
    cut: type[PreTrainedModel],
    text_config: PretrainedConfig,
    device_map: dict[str, torch.device],
    dtype: torch.dtype,
) -> PreTrainedModel:
    prefix = find_decoder(folder)
    settings = {"attn_implementation": attention_of(cut), "use_safetensors": True}
    try:
        unwrap = _unwrap(folder, prefix, cut.base_model_prefix)
        decoder, report = load_pretrained(cut, folder, text_config, device_map, dtype, key_mapping=unwrap, **settings)
    except (ValueError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(f"{folder}: {text_config.model_type} cannot be loaded: {_first_line(error)}") from error
    remove_hook_from_submodules(decoder)  # of accelerate, where there are several devices: they move tensors and wait
    if missing := sorted(report["missing_keys"] - {_FINAL_NORM}):
        raise ModelError(f"{folder}: needed the tensors {', '.join(missing)}, found none of them")
    layers = find_layers(decoder)
    prefixes = re.compile(f"^({re.escape(prefix)}|{cut.base_model_prefix}[.])")
    _check_all_used(folder, {prefixes.sub("", name) for name in report["unexpected_keys"]}, len(layers.layers))
    _check_types(folder, prefix, decoder, len(layers.layers))
    return decoder


def _unwrap(folder: Path, prefix: str, base: str) -> dict[str, str] | None:
    """Return how names in a multimodal wrapper become those of the family's own files, which transformers may convert."""
    outer, inner = read_target_config(folder)
    return {f"^{re.escape(prefix)}": f"{base}."} if inner is not outer else None


def _use_fp8(decoder: PreTrainedModel, folder: Path, random_init: bool, device: torch.device) -> None:
    require_fp8(device)
    if random_init:
        quantize_linears(decoder)
    else:
        use_stored_numbers(decoder, folder, find_decoder(folder), device)


def _check_all_used(folder: Path, unexpected: set[str], num_layers: int) -> None:
    """Raise ModelError for a tensor that belongs to what was loaded but that the decoder has no room for, such as a scale."""
    unknown = sorted(name for name in unexpected if is_loaded(name, num_layers))
    if unknown:
        raise ModelError(f"{folder}: needed tensors that the decoder knows, found {_shorten(unknown)} (quantized weights?)")


def _check_types(folder: Path, prefix: str, decoder: PreTrainedModel, num_layers: int) -> None:
    """Raise ModelError for a weight that was read as a plain number but is an integer or a float8 in its file."""
    integers = {name.rpartition(".")[2] for name, tensor in decoder.state_dict().items() if not tensor.is_floating_point()}
    consumed = find_consumed(folder)
    own = {name: file for name, file in locate_tensors(folder).items() if name.startswith(prefix) and name not in consumed}
    own = {name: file for name, file in own.items() if is_loaded(name.removeprefix(prefix), num_layers)}
    quantized = find_quantized({name: file for name, file in own.items() if name.rpartition(".")[2] not in integers})
    if quantized:
        raise ModelError(f"{folder}: needed weights of 16 bits or more, found integers or float8 in {_shorten(quantized)}")


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return f"{', '.join(names[:_NUM_NAMED])}{more}"


def _make_random(
    cut: type[PreTrainedModel],
    text_config: PretrainedConfig,
    std: float,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> PreTrainedModel:
    """Make each parameter from the seed and its own name; the model computes buffers such as inv_freq."""
    decoder: PreTrainedModel = cut.from_pretrained(
        None, config=text_config, state_dict={}, dtype=dtype, device_map={"": device}, attn_implementation=attention_of(cut)
    )
    embedding = decoder.get_input_embeddings()
    for path, module in decoder.named_modules():
        for name, parameter in module.named_parameters(path, recurse=False):
            own_name = EMBEDDING if module is embedding else name
            fill_random(parameter.data, own_name, type(module).__name__, std, seed)
    return decoder


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
