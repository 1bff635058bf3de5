"""Single tensors out of safetensors folders, and reproducible random ones in their place."""

import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from common.errors import ModelError

_CHUNK_ELEMENTS = 1 << 24
_MASK_32 = 0xFFFFFFFF


def read_tensors(folder: Path, names: Iterable[str], device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read the named tensors, and no others, from the safetensors files of `folder`.

    Raises:
        ModelError: no weights, a name that the folder does not hold, or a file that is missing or damaged.
    """
    files = locate_tensors(folder)
    names = list(names)
    missing = [name for name in names if name not in files]
    if missing:
        raise ModelError(f"{folder}: needed the tensors {', '.join(missing)}, found none of these names")
    return {name: _read_tensor(files[name], name, device, dtype) for name in names}


def find_tensor(folder: Path, suffix: str) -> str:
    """The full name of the model's own `suffix`, such as "embed_tokens.weight", whatever wrapper it stands in.

    Of several (extra prediction layers may carry copies) it is the least nested one.

    Raises:
        ModelError: no weights, or no such tensor.
    """
    names = [name for name in locate_tensors(folder) if f".{name}".endswith(f".{suffix}")]
    if not names:
        raise ModelError(f"{folder}: needed a tensor named {suffix}, found none")
    return min(names, key=lambda name: (name.count("."), name))


def locate_tensors(folder: Path) -> dict[str, Path]:
    """Tensor name -> file, from model.safetensors.index.json or else model.safetensors.

    Raises:
        ModelError: neither is there, or it is damaged.
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
            return tensor.to(dtype)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: needed a safetensors file with {name}, found: {error}") from error


def read_initializer_range(folder: Path) -> float:
    """The standard deviation of a new model's weights, from config.json; 0.02 where it does not say."""
    outer: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return float(outer.get("text_config", outer).get("initializer_range", 0.02))


def random_tensor(
    name: str, shape: Sequence[int], std: float, seed: int, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    """Uniform around 0 with standard deviation `std`: a function of (seed, name, shape) alone.

    Every element is a hash of its position, so that every process and every kind of device makes the same
    bits, and a GPU fills billions of weights in a moment. The hash is `lowbias32` of C. Wellons' hash-prospector,
    applied twice with two keys.
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
    """In place, on int64 elements below 2^32; products may wrap, their low 32 bits are right."""
    bits.bitwise_xor_(bits >> 16)
    bits.mul_(0x7FEB352D).bitwise_and_(_MASK_32)
    bits.bitwise_xor_(bits >> 15)
    bits.mul_(0x846CA68B).bitwise_and_(_MASK_32)
    bits.bitwise_xor_(bits >> 16)


def fill_random(parameter: torch.Tensor, name: str, module_type: str, std: float, seed: int) -> None:
    """Fill one parameter of a made-up target: biases 0, norms 1, all else from the seed and its name in the decoder."""
    if name.endswith("bias"):
        parameter.zero_()
    elif "Norm" in module_type:
        parameter.fill_(1.0)
    else:
        parameter.copy_(random_tensor(name, parameter.shape, std, seed, parameter.device, parameter.dtype))
