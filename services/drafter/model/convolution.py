"""The dynamic convolution of DFlash 2: each row of a block is mixed with its predecessor, by weights made from the row.

Shapes: R rows, H hidden, S = 2 convolutions of a sublayer (before it, after it), T = 2 taps (the row, its predecessor),
G groups of H / G neighbouring channels that share the dynamic part of a weight.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CONVOLUTIONS, NUM_TAPS = 2, 2


class DynamicConvolution(nn.Module):
    """The weights of both convolutions around one sublayer; `convolve` computes them."""

    def __init__(self, hidden_size: int, group_size: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.empty(NUM_CONVOLUTIONS, NUM_TAPS, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, NUM_CONVOLUTIONS * NUM_TAPS * (hidden_size // group_size), bias=False)

    @torch.no_grad()
    def initialise(self) -> None:
        """Make both convolutions the identity: the base takes the row itself, and the projection adds nothing to it."""
        self.base_kernel.zero_()
        self.base_kernel[:, 0] = 1.0
        self.kernel_projection.weight.zero_()

    def weights(self) -> tuple[Tensor, Tensor]:
        return self.base_kernel, self.kernel_projection.weight


def convolve(rows: Tensor, kernels: Tensor, base: Tensor, side: int, is_first: Tensor) -> Tensor:
    """Return base + dynamic weight of the row times the row, plus the same of the second tap times its predecessor.

    Args:
        rows: [R, H], block after block.
        kernels: [R, S * T * G], laid out convolution, tap, group: the projection of the rows that entered the sublayer.
        base: [S, T, H].
        side: 0 before the sublayer, 1 after it.
        is_first: bool [R, 1]; the first row of a block has no predecessor.
    """
    dynamic = kernels.view(len(rows), NUM_CONVOLUTIONS, NUM_TAPS, -1)[:, side]
    chosen: Any = Mix.apply if rows.is_cuda else mix
    output: Tensor = chosen(rows, dynamic, base[side], is_first)
    return output


def mix(rows: Tensor, dynamic: Tensor, base: Tensor, is_first: Tensor) -> Tensor:
    """Convolve rows [R, H] with weights base [T, H] + dynamic [R, T, G]."""
    num_rows, num_taps, num_groups = dynamic.shape
    before = F.pad(rows[:-1], (0, 0, 1, 0)).masked_fill(is_first, 0.0)
    weights = base.view(num_taps, num_groups, -1) + dynamic[..., None]
    own, previous = weights.view(num_rows, num_taps, -1).unbind(1)
    return own * rows + previous * before


class Mix(torch.autograd.Function):
    """`mix` with a backward pass that reads gradient and rows once for all three results."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, dynamic: Tensor, base: Tensor, is_first: Tensor) -> Tensor:
        ctx.save_for_backward(rows, dynamic, base, is_first)
        return mix(rows, dynamic, base, is_first)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        of_rows, of_dynamic, of_base = mix_backward(gradients[0].contiguous(), *ctx.saved_tensors)
        return of_rows, of_dynamic, of_base, None


@torch.library.custom_op("headrace::mix_backward", mutates_args=())
def mix_backward(
    gradient: Tensor, rows: Tensor, dynamic: Tensor, base: Tensor, is_first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of rows, dynamic and base of `mix` from that of its output, as one operator for the compiler."""
    from services.drafter.kernels import convolution_kernel  # triton comes with torch for GPUs only

    return convolution_kernel.convolution_backward(gradient, rows, dynamic, base, is_first)


@mix_backward.register_fake
def _(gradient: Tensor, rows: Tensor, dynamic: Tensor, base: Tensor, is_first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(rows), dynamic.new_empty(dynamic.shape), torch.empty_like(base)
