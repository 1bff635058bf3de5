"""Linear layers of an FP8 checkpoint computed in FP8: numbers and scales as they are stored, activations rounded by row.

    y [R, out] = (x [R, in] / factor of its row, in e4m3) @ numbers [out, in].T * factor * scale of the output channel + bias

Sums are float32. Weights whose scales change along a row, such as those in blocks, and experts stay dequantized.
"""

import logging
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from common.dequantize import open_dequantized
from common.errors import ConfigError
from common.quantized_weights import find_quantized_weights

_E4M3_MAX = 448.0  # of float8_e4m3fn
_HOPPER = (9, 0)
_MULTIPLE = 16  # of both sizes of a weight, for the matrix product in FP8

log = logging.getLogger(__name__)


def quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return [R, W] as float8_e4m3fn, and the factor of each row, float32 [R, 1], that restores it."""
    factors = (rows.abs().amax(1, keepdim=True).float() / _E4M3_MAX).clamp(min=1e-30)
    return (rows.float() / factors).to(torch.float8_e4m3fn), factors


class Fp8Linear(nn.Linear):
    """Takes the place of a linear layer; its weight is float8_e4m3fn [out, in]."""

    scales: torch.Tensor  # float32 [1, out]

    def __init__(self, plain: nn.Linear, numbers: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__(plain.in_features, plain.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(numbers, requires_grad=False)
        self.bias = plain.bias
        self.register_buffer("scales", scales.expand(plain.out_features, 1).T.contiguous())
        self._quantize = torch.compile(quantize, dynamic=True) if numbers.is_cuda else quantize

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Multiply [..., in] of bfloat16."""
        values, factors = self._quantize(rows.reshape(-1, self.in_features))
        made = torch._scaled_mm(values, self.weight.T, factors, self.scales, out_dtype=rows.dtype)
        made = made if self.bias is None else made + self.bias
        return made.reshape(*rows.shape[:-1], self.out_features)


def require_fp8(device: torch.device) -> None:
    """Raise ConfigError unless the device multiplies in FP8 with a factor for each row."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _HOPPER:
        found = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        raise ConfigError(f'targets.precision: needed a GPU of compute capability 9.0 or more for "checkpoint", found {found}')


def use_stored_numbers(decoder: PreTrainedModel, folder: Path, prefix: str, device: torch.device) -> None:
    """Replace the linear layers whose weights in `folder`, with `prefix` before their names, are FP8 with a scale per row.

    Raises:
        ConfigError: there are none.
    """
    weights, slices = find_quantized_weights(folder), open_dequantized(folder, device, decoder.dtype)
    linears = _linears(decoder)
    num_replaced = 0
    for name, module in linears.items():
        weight = weights.get(f"{prefix}{name}.weight")
        if weight is None or weight.rule.coding != "plain" or weight.grid[1] > 1:
            continue
        numbers, scales = slices[f"{prefix}{name}.weight"].stored()
        if numbers.dtype == torch.float8_e4m3fn:
            decoder.set_submodule(name, Fp8Linear(module, numbers, scales))
            num_replaced += 1
    if not num_replaced:
        needed = "FP8 weights with a scale per tensor or channel"
        raise ConfigError(f'targets.precision: needed {needed} for "checkpoint", found none in {folder}')
    log.info("%d of %d linear layers are computed in FP8", num_replaced, len(linears))


def quantize_linears(decoder: PreTrainedModel) -> None:
    """Replace the linear layers of a random target, as if its checkpoint were FP8 with a scale per channel."""
    for name, module in _linears(decoder).items():
        decoder.set_submodule(name, Fp8Linear(module, *quantize(module.weight.data)))


def _linears(decoder: PreTrainedModel) -> dict[str, nn.Linear]:
    modules = {name: module for name, module in decoder.named_modules() if type(module) is nn.Linear}
    return {name: module for name, module in modules.items() if not any(size % _MULTIPLE for size in module.weight.shape)}
