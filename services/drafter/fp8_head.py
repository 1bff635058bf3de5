"""The target's head in FP8: half the time of its products, at the price of rounding to three bits of mantissa.

Both factors of a product are scaled by row, so that the largest of every row is the largest that e4m3 has; sums are in
float32. The gradient leaves the label out of the rounding: the probabilities of the other tokens share one scale, and the
label's row of the head counts as it is. So a flat tail keeps its direction, and a row that is certain its small size.

Shapes: R rows, H hidden, V vocabulary.
"""

import torch
from torch import Tensor

from services.drafter.fused import fused

_LARGEST = 448.0  # of float8_e4m3fn
_CHUNK_ROWS = 4096  # of a weight, scaled at a time


@fused
def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[n, W] as float8_e4m3fn, and what each row is to be multiplied by: float32 [n, 1]."""
    scale = (rows.abs().amax(1, keepdim=True).float() / _LARGEST).clamp(min=1e-30)
    return (rows.float() / scale).to(torch.float8_e4m3fn), scale


def _quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """As `quantise`, part by part."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, device=weight.device)
    for first in range(0, len(weight), _CHUNK_ROWS):
        part = slice(first, first + _CHUNK_ROWS)
        values[part], scales[part] = quantise(weight[part].contiguous())
    return values, scales.T.contiguous()


class Fp8Head:
    """Takes the place of the head's weight in the training loss; evaluation and export have the weight itself."""

    def __init__(self, weight: Tensor, *, gradient_in_fp8: bool) -> None:
        """
        Args:
            weight: [V, H], kept; H and V are multiples of 16.
            gradient_in_fp8: whether the second product is in FP8 too, which takes a second copy of the weight.
        """
        self.weight = weight
        self._values, self._scales = _quantise_weight(weight)  # [V, H], [1, V]
        self._columns = _quantise_weight(weight.T) if gradient_in_fp8 else None  # [H, V], [1, H]

    def logits(self, rows: Tensor) -> Tensor:
        """bfloat16 [R, V] of [R, H]."""
        values, scales = quantise(rows)
        return torch._scaled_mm(values, self._values.T, scales, self._scales, out_dtype=torch.bfloat16)

    def gradient(self, errors: Tensor, labels: Tensor) -> Tensor:
        """[R, H] from the gradient of the logits [R, V]: probabilities, minus 1 at the label; it is overwritten."""
        if self._columns is None:
            return errors.to(self.weight.dtype) @ self.weight
        of_label = errors.gather(1, labels[:, None])
        errors.scatter_(1, labels[:, None], 0.0)
        values, scales = quantise(errors)
        of_others = torch._scaled_mm(values, self._columns[0].T, scales, self._columns[1], out_dtype=torch.bfloat16)
        return of_others + of_label * self.weight[labels]
