"""A target's decoder in the memory of its device: read from its folder, or made from the seed.

The loader of transformers maps the files, so the targets of a node share their pages; it reads only tensors that the cut
decoder has, and copies each from the mapping straight to the device. Buffers that no file holds, such as inv_freq, are
computed on the device.
"""

import logging
import re
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.config import Config
from common.decoder_config import read_text_config
from common.errors import ModelError
from common.target_limits import refuse_quantized
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
from services.target.linear_attention import choose_kernels

log = logging.getLogger(__name__)

_GIB = 2**30
_NUM_NAMED = 3  # tensors in an error
_FINAL_NORM = "norm.weight"  # never run, and renamed by mistake in transformers' files of DeepSeek-V4


def load_decoder(config: Config, device: torch.device) -> PreTrainedModel:
    """Load the embedding and the layers up to the last tap of `config.model.path` to `device`; with random_init, make them."""
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
    if config.model.random_init:
        decoder = _make_random(cut, text_config, read_initializer_range(folder), config.seed, device, dtype)
    else:
        decoder = _read(folder, cut, text_config, device, dtype)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    num_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    how = "made" if config.model.random_init else "read"
    log.info("weights %s in %.1f s: %.2f GiB on %s", how, time.monotonic() - began, num_bytes / _GIB, device)
    choose_kernels(decoder, device)
    return decoder


def _read(
    folder: Path, cut: type[PreTrainedModel], text_config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    refuse_quantized(folder)
    prefix = find_decoder(folder)
    try:
        loaded: Any = cut.from_pretrained(
            folder,
            config=text_config,
            dtype=dtype,
            device_map={"": device},
            attn_implementation=attention_of(cut),
            key_mapping=_unwrap(folder, prefix, cut.base_model_prefix),
            output_loading_info=True,
            local_files_only=True,
            use_safetensors=True,
        )
    except (ValueError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(f"{folder}: {text_config.model_type} cannot be loaded: {_first_line(error)}") from error
    decoder: PreTrainedModel
    decoder, report = loaded
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


def _check_all_used(folder: Path, unexpected: set[str], num_layers: int) -> None:
    """Raise ModelError for a tensor that belongs to what was loaded but that the decoder has no room for, such as a scale."""
    unknown = sorted(name for name in unexpected if is_loaded(name, num_layers))
    if unknown:
        raise ModelError(f"{folder}: needed tensors that the decoder knows, found {_shorten(unknown)} (quantized weights?)")


def _check_types(folder: Path, prefix: str, decoder: PreTrainedModel, num_layers: int) -> None:
    """Raise ModelError for a weight that was read as a plain number but is an integer or a float8 in its file."""
    integers = {name.rpartition(".")[2] for name, tensor in decoder.state_dict().items() if not tensor.is_floating_point()}
    own = {name: file for name, file in locate_tensors(folder).items() if name.startswith(prefix)}
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
