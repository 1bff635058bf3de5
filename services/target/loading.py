"""A target's decoder in the memory of its device: read from its folder, or made from the seed.

The loader of transformers maps the files, so the targets of a node share their pages; it reads only tensors that the cut
decoder has, and copies each from the mapping straight to the device. Buffers that no file holds, such as inv_freq, are
computed on the device.
"""

import contextlib
import logging
import re
import time
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from common.config import Config
from common.errors import ModelError
from common.quantized_weights import find_consumed
from common.weights import EMBEDDING, fill_random, find_embedding, find_quantized, locate_tensors, read_initializer_range
from services.target.checkpoint import load_pretrained
from services.target.fp8_linear import quantize_linears, require_fp8, use_stored_numbers
from services.target.linear_attention import choose_kernels

log = logging.getLogger(__name__)

_GIB = 2**30
_NUM_NAMED = 3  # tensors in an error


def load_decoder(config: Config, device: torch.device) -> PreTrainedModel:
    """Load the embedding and the layers up to the last tap of `config.model.path` to `device`; with random_init, make them."""
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
    if config.model.random_init:
        decoder = _make_random(text_config, read_initializer_range(folder), config.seed, device, dtype)
    else:
        decoder = _read(folder, text_config, device, dtype)
    if config.targets.precision == "checkpoint":
        _use_fp8(decoder, folder, config.model.random_init, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    num_bytes = sum(parameter.nbytes for parameter in decoder.parameters())
    how = "made" if config.model.random_init else "read"
    log.info("weights %s in %.1f s: %.2f GiB on %s", how, time.monotonic() - began, num_bytes / _GIB, device)
    choose_kernels(decoder, device)
    return decoder


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


def _read(folder: Path, text_config: PretrainedConfig, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    prefix = find_embedding(folder).removesuffix(EMBEDDING)
    try:
        settings = {"attn_implementation": "sdpa", "key_mapping": {f"^{re.escape(prefix)}": ""}, "use_safetensors": True}
        decoder, report = load_pretrained(AutoModel, folder, text_config, device, dtype, **settings)
    except (ValueError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(f"{folder}: {text_config.model_type} cannot be loaded: {_first_line(error)}") from error
    if report["missing_keys"]:
        raise ModelError(f"{folder}: needed the tensors {', '.join(sorted(report['missing_keys']))}, found none of them")
    _check_all_used(folder, report["unexpected_keys"], text_config.num_hidden_layers)
    _check_types(folder, prefix, decoder)
    return decoder


def _use_fp8(decoder: PreTrainedModel, folder: Path, random_init: bool, device: torch.device) -> None:
    require_fp8(device)
    if random_init:
        quantize_linears(decoder)
    else:
        use_stored_numbers(decoder, folder, find_embedding(folder).removesuffix(EMBEDDING), device)


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
    consumed = find_consumed(folder)
    files = {name: file for name, file in locate_tensors(folder).items() if name.startswith(parts) and name not in consumed}
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
