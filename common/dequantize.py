"""Quantized weights as plain ones: each number times its scale in float32, then rounded once to the dtype that is needed."""

import logging
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open

from common.errors import ModelError
from common.quantization import ALL, Rule
from common.quantized_weights import QuantizedWeight, find_quantized_weights, is_ignored, read_headers

log = logging.getLogger(__name__)

_FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1 by its bits
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # which four bits hold column 0, 1, ...
_CHUNK_ELEMENTS = 1 << 24  # of a weight that are in float32 at a time


class DequantizedSlice:
    """Stands in a state dict for a weight that is made when the loader of transformers reads it, by `[...]`."""

    def __init__(self, weight: QuantizedWeight, slices: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
        self._weight, self._slices = weight, slices  # by name, of safetensors files
        self._device, self._dtype = device, dtype

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        """Read the numbers in parts, so that memory holds little more than the result."""
        rule, shape = self._weight.rule, self._weight.shape
        *lead, rows, columns = shape
        made = torch.empty((*lead, columns, rows) if rule.is_transposed else shape, dtype=self._dtype, device=self._device)
        stored = made.transpose(-1, -2) if rule.is_transposed else made
        scales, zeros = self._read_scales()
        numbers = self._slices[self._weight.numbers]
        per_row = rule.per_element if rule.coding.startswith("gptq") else 1
        step = max(1, _CHUNK_ELEMENTS // max(1, stored[0].numel() * per_row))
        for start in range(0, len(stored) // per_row, step):
            part = slice(start * per_row, (start + step) * per_row)
            values = _values(numbers[start : start + step].to(self._device), rule)
            values = values if zeros is None else values.sub_(zeros[part])
            stored[part] = values.mul_(_repeat(scales[part], self._weight.block[1], columns, -1))
        return made

    def stored(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the numbers as they are in the file, and the scales of every row in float32 [..., rows, blocks]."""
        return self._slices[self._weight.numbers][...].to(self._device), self._read_scales()[0]

    def _read_scales(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scales of every row in float32 [..., rows, blocks], and its zero points, if there are some."""
        weight = self._weight
        *lead, rows, _ = weight.shape
        scales = self._slices[weight.scales][...].to(self._device)
        scales = scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales  # bytes are exponents
        parts = [scales.to(torch.float32).reshape(*lead, *weight.grid)]
        if weight.zeros:
            parts.append(_zero_points(self._slices[weight.zeros][...].to(self._device), weight.rule))
        if weight.groups:
            groups = self._slices[weight.groups][...].to(self._device)
            if not 0 <= int(groups.min()) <= int(groups.max()) < weight.grid[0]:
                raise ModelError(
                    f"{weight.groups}: needed groups 0 to {weight.grid[0] - 1}, found {groups.min()} to {groups.max()}"
                )
            parts = [part[groups] for part in parts]
        else:
            parts = [_repeat(part, weight.block[0], rows, -2) for part in parts]
        return parts[0], parts[1] if weight.zeros else None


def open_dequantized(folder: Path, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Return name -> slice of a file, or `DequantizedSlice` of a quantized weight, of every tensor that a plain folder has.

    Scales of activations and caches are left out.

    Raises:
        ModelError: as `find_quantized_weights`.
        SafetensorError: a file is damaged.
    """
    weights, headers = find_quantized_weights(folder), read_headers(folder)
    files: dict[Path, Any] = {path: safe_open(path, framework="pt") for path in {header.file for header in headers.values()}}
    slices = {name: files[header.file].get_slice(name) for name, header in headers.items() if not is_ignored(name)}
    for name, weight in weights.items():
        own = {tensor: slices.pop(tensor) for tensor in weight.tensors}
        slices[name] = DequantizedSlice(weight, own, device, dtype)
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


def _values(numbers: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return numbers as they are stored in float32 [..., rows, columns]."""
    match rule.coding:
        case "plain":
            return numbers.to(torch.float32)
        case "mxfp4":  # [..., rows, blocks, bytes], the lower four bits first
            codes = torch.stack((numbers & 15, numbers >> 4), -1).to(torch.int32)
            return torch.tensor(_FLOAT4, device=numbers.device)[codes].flatten(-3)
        case "packed":
            return _unpack(numbers, rule).sub_(1 << (32 // rule.per_element - 1)).to(torch.float32)
        case "gptq" | "gptq_v2":  # eight rows in one
            return _unpack(numbers.T, rule).T.to(torch.float32)
    return _unpack(numbers, rule).to(torch.float32)


def _zero_points(packed: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return zero points in float32 [groups, columns]; the first version of GPTQ stores them less one, in the same bits."""
    zeros = _unpack(packed, rule)
    if rule.coding == "gptq":
        zeros = (zeros + 1) & ((1 << (32 // rule.per_element)) - 1)
    return zeros.to(torch.float32)


def _unpack(packed: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Return the unsigned numbers of int32 [..., elements] as int32 [..., columns], those of the lowest bits first."""
    bits = 32 // rule.per_element
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    if rule.coding == "awq":
        shifts = shifts[list(_AWQ_ORDER)]
    return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _repeat(scales: torch.Tensor, block: int, size: int, axis: int) -> torch.Tensor:
    """Repeat each scale along an axis for its block, whose last one may be cut."""
    if block == ALL:
        shape = list(scales.shape)
        shape[axis] = size
        return scales.expand(shape)
    return scales.repeat_interleave(block, axis).narrow(axis, 0, size)
