"""The target's head in FP8: the matrix products take half the time, rounded to the three mantissa bits of e4m3.

Both factors of a product are scaled by row, so that the largest value of a row becomes the largest of e4m3; sums are
float32. The gradient keeps the label out of the rounding: one scale per row must fit the probabilities of the other
tokens, which are far smaller than the label's entry (p - 1) in a flat row. The label's row of the head is multiplied exactly.

Shapes: R rows, H hidden, V vocabulary.

    logits  bfloat16 [R, V] = rows [R, H] @ weight [V, H].T             dlogits [R, V]: p, less 1 at the label
    drows   bfloat16 [R, H] = dlogits without label @ weight + dlogits[label] * weight[label]
"""

import torch
from torch import Tensor

from services.drafter.kernels.fused import fused

_E4M3_MAX = 448.0  # of float8_e4m3fn
_CHUNK_ROWS = 4096  # of a weight, quantised at a time: bounds the float32 copy


@fused
def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return [n, W] as float8_e4m3fn, and the factor of each row, float32 [n, 1], that restores it."""
    scale = (rows.abs().amax(1, keepdim=True).float() / _E4M3_MAX).clamp(min=1e-30)
    return (rows.float() / scale).to(torch.float8_e4m3fn), scale


def _quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise [n, W] in chunks of rows; returns the values [n, W] and the scales [1, n]."""
    values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty(weight.shape[0], 1, device=weight.device)
    for first in range(0, len(weight), _CHUNK_ROWS):
        chunk = slice(first, first + _CHUNK_ROWS)
        values[chunk], scales[chunk] = quantise(weight[chunk].contiguous())
    return values, scales.T.contiguous()


class Fp8Head:
    """Stands in for the head's weight in the training loss; evaluation and export use the weight itself."""

    def __init__(self, weight: Tensor, *, gradient_in_fp8: bool) -> None:
        """Quantise the weight [V, H], both multiples of 16; for drows in FP8 too, a second copy of it is quantised."""
        self.weight = weight
        self._values, self._scales = _quantise_weight(weight)  # [V, H], [1, V]
        self._transposed = _quantise_weight(weight.T) if gradient_in_fp8 else None  # [H, V], [1, H]

    def logits(self, rows: Tensor) -> Tensor:
        """Return bfloat16 [R, V] for rows [R, H]."""
        values, scales = quantise(rows)
        return torch._scaled_mm(values, self._values.T, scales, self._scales, out_dtype=torch.bfloat16)

    def gradient(self, dlogits: Tensor, labels: Tensor) -> Tensor:
        """Return drows [R, H] from dlogits [R, V] (p, less 1 at the label), which are overwritten."""
        if self._transposed is None:
            return dlogits.to(self.weight.dtype) @ self.weight
        dlabel = dlogits.gather(1, labels[:, None])
        dlogits.scatter_(1, labels[:, None], 0.0)
        values, scales = quantise(dlogits)
        weight, weight_scales = self._transposed
        drows = torch._scaled_mm(values, weight.T, scales, weight_scales, out_dtype=torch.bfloat16)
        return drows + dlabel * self.weight[labels]
