"""The dynamic convolution of DFlash 2: each row of a block is mixed with its predecessor, by weights made from the row.

Shapes: R rows, H hidden, S = 2 convolutions of a sublayer (before it, after it), T = 2 taps (the row, its predecessor),
G groups of H / G neighbouring channels that share the dynamic part of a weight.
"""

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
    num_rows, hidden = rows.shape
    before = F.pad(rows[:-1], (0, 0, 1, 0)).masked_fill(is_first, 0.0)
    num_groups = kernels.shape[1] // (NUM_CONVOLUTIONS * NUM_TAPS)
    dynamic = kernels.view(num_rows, NUM_CONVOLUTIONS, NUM_TAPS, num_groups, 1)[:, side]
    own, previous = (base[side].view(NUM_TAPS, num_groups, -1) + dynamic).view(num_rows, NUM_TAPS, hidden).unbind(1)
    return own * rows + previous * before
