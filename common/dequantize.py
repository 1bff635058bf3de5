"""Quantized weights as plain ones: each number times its scale in float32, then rounded once to the dtype that is needed."""

import logging
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open

from common.quantization import ALL
from common.quantized_weights import QuantizedWeight, find_quantized_weights, is_ignored, read_headers

log = logging.getLogger(__name__)

_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1 by its bits
_CHUNK_ELEMENTS = 1 << 24  # of a weight that are in float32 at a time


class DequantizedSlice:
    """Stands in a state dict for a weight that is made when the loader of transformers reads it, by `[...]`."""

    def __init__(self, weight: QuantizedWeight, numbers: Any, scales: Any, device: torch.device, dtype: torch.dtype) -> None:
        self._weight, self._numbers, self._scales = weight, numbers, scales  # slices of safetensors files
        self._device, self._dtype = device, dtype

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        """Read the numbers in parts, so that memory holds little more than the result."""
        weight = self._weight
        *lead, rows, columns = weight.shape
        made = torch.empty(
            (*lead, columns, rows) if weight.rule.transposed else weight.shape, dtype=self._dtype, device=self._device
        )
        target = made.transpose(-1, -2) if weight.rule.transposed else made
        scales = _scale_values(self._scales[...].to(self._device)).reshape(*lead, *weight.grid)
        scales = _repeat(scales, weight.block[0], rows, -2)
        step = max(1, _CHUNK_ELEMENTS // max(1, made[0].numel()))
        for start in range(0, len(target), step):
            numbers = _values(self._numbers[start : start + step].to(self._device), weight.rule.per_element)
            factors = _repeat(scales[start : start + step], weight.block[1], columns, -1)
            target[start : start + step] = numbers.mul_(factors)
        return made


def open_dequantized(folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return name -> slice of a file, or `DequantizedSlice` of a quantized weight, of every tensor that a plain folder has.

    Scales of activations and caches are left out.

    Raises:
        ModelError: as `find_quantized_weights`.
        SafetensorError: a file is damaged.
    """
    weights, headers = find_quantized_weights(folder), read_headers(folder)
    files = {path: safe_open(path, framework="pt") for path in {header.file for header in headers.values()}}
    slices = {name: files[header.file].get_slice(name) for name, header in headers.items() if not is_ignored(name)}
    for name, weight in weights.items():
        numbers, scales = slices.pop(weight.numbers), slices.pop(weight.scales)
        slices[name] = DequantizedSlice(weight, numbers, scales, device, dtype)
    ignored = sorted({name.rpartition(".")[2] for name in headers if is_ignored(name)})
    log.info(
        "%d quantized weights are dequantized while they are read, %s ignored", len(weights), ", ".join(ignored) or "nothing"
    )
    return slices


def read_dequantized(folder: Path, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
    """Return one weight, None if it is not a quantized one of `folder`; ModelError as `find_quantized_weights`."""
    if name not in find_quantized_weights(folder):
        return None
    weight: torch.Tensor = open_dequantized(folder, device, dtype)[name][...]
    return weight


def _values(numbers: torch.Tensor, per_element: int) -> torch.Tensor:
    """Return packed or plain numbers [..., rows, elements] in float32 [..., rows, columns]."""
    if per_element == 1:
        return numbers.to(torch.float32)
    if numbers.dtype == torch.uint8:  # MXFP4 [..., rows, blocks, bytes], the lower four bits first
        table = torch.tensor(_FLOAT4, device=numbers.device)
        codes = torch.stack((numbers & 15, numbers >> 4), -1).to(torch.int32)
        return table[codes].flatten(-3)
    bits = 32 // per_element
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=numbers.device)
    codes = (numbers.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return codes.flatten(-2).sub_(1 << (bits - 1)).to(torch.float32)


def _scale_values(scales: torch.Tensor) -> torch.Tensor:
    """Return scales in float32; bytes are exponents, of the type that torch calls float8_e8m0fnu."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32)


def _repeat(scales: torch.Tensor, block: int, size: int, axis: int) -> torch.Tensor:
    """Repeat each scale along an axis for its block, whose last one may be cut."""
    if block == ALL:
        shape = list(scales.shape)
        shape[axis] = size
        return scales.expand(shape)
    return scales.repeat_interleave(block, axis).narrow(axis, 0, size)
