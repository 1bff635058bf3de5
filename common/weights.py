"""Single tensors from safetensors folders, and reproducible random tensors for folders without weights."""

import hashlib
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.dequantize import read_dequantized
from common.errors import ModelError

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # the names under which random ones are made
# Below the prefix of any wrapper, in the files of every family.
_EMBEDDINGS = (EMBEDDING, "embed_in.weight", "word_embeddings.weight", "wte.weight", "embeddings.weight", "embed.weight")
_HEADS = (HEAD, "embed_out.weight", "head.weight")
_LAYER_LISTS = ("layers", "h", "blocks")
_IN_LAYER = re.compile(rf"(?:{'|'.join(_LAYER_LISTS)})\.(\d+)\.")
_PLAIN_TYPES = ("F64", "F32", "F16", "BF16")  # in a file; integers and float8 need scales
_CHUNK_ELEMENTS = 1 << 24
_MASK_32 = 0xFFFFFFFF


def read_tensors(folder: Path, names: Iterable[str], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read the named tensors, and no others, from the safetensors files of `folder`; quantized weights are dequantized.

    Raises:
        ModelError: no weights, a name that the folder does not hold, a file that is missing or damaged, or quantized numbers
            without a rule.
    """
    files = locate_tensors(folder)
    names = list(names)
    missing = [name for name in names if name not in files]
    if missing:
        raise ModelError(f"{folder}: needed the tensors {', '.join(missing)}, found none of these names")
    return {name: _read_tensor(files[name], name, device, dtype) for name in names}


def find_embedding(folder: Path) -> str:
    """Return the full name of the decoder's embedding.

    Extra prediction layers may carry an embedding of their own, nested less than the decoder's, so the embedding with the
    most layers beside it is the decoder's.

    Raises:
        ModelError: no weights, or no embedding.
    """
    names = locate_tensors(folder)
    found = [(name, prefix) for name in names if (prefix := _prefix(name, _EMBEDDINGS)) is not None]
    if not found:
        raise ModelError(f"{folder}: needed a tensor named {EMBEDDING}, found none")
    return min(found, key=lambda each: (-_num_layers(names, each[1]), each[0].count("."), each[0]))[0]


def find_decoder(folder: Path) -> str:
    """Return the prefix of the decoder's tensors, with its dot; errors as `find_embedding`."""
    return _prefix(find_embedding(folder), _EMBEDDINGS) or ""


def find_head(folder: Path) -> str:
    """Return the full name of the head of the innermost module that holds a head and the decoder.

    Raises:
        ModelError: no weights, no embedding, or no head.
    """
    names, decoder = locate_tensors(folder), find_decoder(folder)
    heads = [(name, prefix) for name in names if (prefix := _prefix(name, _HEADS)) is not None]
    found = [name for name, prefix in heads if decoder.startswith(prefix)]
    if not found:
        raise ModelError(f"{folder}: needed a tensor named {HEAD}, found none")
    return max(found, key=len)


def _prefix(name: str, suffixes: Iterable[str]) -> str | None:
    """Return the part of a name before one of the suffixes, which are whole names of modules; None without one."""
    return next((name.removesuffix(suffix) for suffix in suffixes if f".{name}".endswith(f".{suffix}")), None)


def is_loaded(name: str, num_layers: int) -> bool:
    """Return whether a tensor, named below the decoder's prefix, is its embedding or in one of its first layers."""
    layer = _IN_LAYER.match(name)
    return int(layer[1]) < num_layers if layer else f"{name.rpartition('.')[0]}.weight" in _EMBEDDINGS


def find_quantized(files: Mapping[str, Path]) -> list[str]:
    """Return the names of the tensors, name -> file, that are integers or float8, so no weights by themselves."""
    names: dict[Path, list[str]] = defaultdict(list)
    for name, path in files.items():
        names[path].append(name)
    found = []
    for path, own in names.items():
        with safe_open(path, framework="pt") as file:
            found += [name for name in own if file.get_slice(name).get_dtype() not in _PLAIN_TYPES]
    return found


def _num_layers(names: Iterable[str], prefix: str) -> int:
    starts = [f"{prefix}{name}." for name in _LAYER_LISTS]
    return max(len({name[len(start) :].partition(".")[0] for name in names if name.startswith(start)}) for start in starts)


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Return name -> file of every tensor, from model.safetensors.index.json or else model.safetensors.

    Raises:
        ModelError: neither file is there, or it is damaged.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if index.is_file():
            return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except (ValueError, KeyError) as error:
        raise ModelError(f"{index}: needed an index with a weight_map, found: {error!r}") from error
    except SafetensorError as error:
        raise ModelError(f"{single}: needed a safetensors file, found: {error}") from error
    raise ModelError(f"{folder}: needed model.safetensors or model.safetensors.index.json, found neither")


def _read_tensor(path: Path, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            tensor: torch.Tensor = file.get_tensor(name)
            found = file.get_slice(name).get_dtype()
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: needed a safetensors file with {name}, found: {error}") from error
    if found not in _PLAIN_TYPES:
        dequantized = read_dequantized(path.parent, name, device, dtype)
        if dequantized is not None:
            return dequantized
        raise ModelError(f"{path}: needed {name} of type {', '.join(_PLAIN_TYPES)}, found {found}")
    return tensor.to(dtype)


def read_initializer_range(folder: Path) -> float:
    """Return the standard deviation of a new model's weights from config.json, or else 0.02."""
    outer: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return float(outer.get("text_config", outer).get("initializer_range", 0.02))


def random_tensor(
    name: str, shape: Sequence[int], std: float, seed: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Return uniform values around 0 with standard deviation `std`, a function of (seed, name, shape) alone.

    Every element is a hash of its position, so every process and every kind of device makes the same bits. The hash is
    `lowbias32` of C. Wellons' hash-prospector, applied twice with two keys.
    """
    tensor = torch.empty(tuple(shape), device=device, dtype=dtype)
    for number, chunk in enumerate(torch.split(tensor.view(-1), _CHUNK_ELEMENTS)):
        digest = hashlib.sha256(f"{seed} {name} {list(shape)} {number}".encode()).digest()
        bits = torch.arange(chunk.numel(), device=device)
        for key in (digest[:4], digest[4:8]):
            _hash_32_bits_(bits.bitwise_xor_(int.from_bytes(key, "little")))
        uniform = bits.bitwise_right_shift_(8).to(torch.float32).mul_(2.0**-24).sub_(0.5)
        chunk.copy_(uniform.mul_(std * math.sqrt(12.0)))
    return tensor


def _hash_32_bits_(bits: torch.Tensor) -> None:
    """Hash int64 elements smaller than 2^32 in place; products may wrap, their low 32 bits are right."""
    bits.bitwise_xor_(bits >> 16)
    bits.mul_(0x7FEB352D).bitwise_and_(_MASK_32)
    bits.bitwise_xor_(bits >> 15)
    bits.mul_(0x846CA68B).bitwise_and_(_MASK_32)
    bits.bitwise_xor_(bits >> 16)


def fill_random(parameter: torch.Tensor, name: str, module_type: str, std: float, seed: int) -> None:
    """Fill one parameter of a random target: biases 0, norms 1, others from the seed and the name in the decoder."""
    if name.endswith("bias"):
        parameter.zero_()
    elif "Norm" in module_type:
        parameter.fill_(1.0)
    else:
        parameter.copy_(random_tensor(name, parameter.shape, std, seed, parameter.device, parameter.dtype))
