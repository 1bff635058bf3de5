"""Triton kernel for the backward pass of a convolution within blocks, in one pass over its rows.

Shapes: R rows, H hidden, G groups of H / G neighbouring channels, 2 taps (the row, its predecessor in the block).

    output[r] = (base[0] + dynamic[r, 0]) * rows[r] + (base[1] + dynamic[r, 1]) * rows[r - 1]

Compiled code would read gradient and rows once for each of the three results, which are sums along different dimensions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _CHANNELS, _NUM_WARPS = 32, 256, 8


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _convolution_backward(  # type: ignore[no-untyped-def]
    gradient, rows, dynamic, base, is_first, of_rows, of_dynamic, of_base, num_rows, hidden, dynamic_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Compute the gradients of ROWS rows in GROUPS groups of channels; that of the base is a sum over these rows only."""
    num_groups = hidden // GROUP
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, LANES)
    channel = group[:, None] * GROUP + lane[None, :]
    is_channel = (group < num_groups)[:, None] & (lane < GROUP)[None, :]
    is_row = (row < num_rows)[:, None]
    has_before = (tl.load(is_first + row, mask=row < num_rows, other=1) == 0)[:, None]
    has_after = (tl.load(is_first + row + 1, mask=row + 1 < num_rows, other=1) == 0)[:, None]

    weight, is_group = row[:, None] * dynamic_stride + group[None, :], (group < num_groups)[None, :]
    dynamic_own = tl.load(dynamic + weight, mask=is_row & is_group, other=0.0).to(tl.float32)
    dynamic_after = tl.load(dynamic + weight + dynamic_stride + num_groups, mask=has_after & is_group, other=0.0).to(tl.float32)
    base_own = tl.load(base + channel, mask=is_channel, other=0.0).to(tl.float32)
    base_after = tl.load(base + hidden + channel, mask=is_channel, other=0.0).to(tl.float32)

    at, is_channel = row[:, None, None] * hidden + channel[None], is_channel[None]
    whole = is_row[:, :, None] & is_channel
    own = tl.load(gradient + at, mask=whole, other=0.0).to(tl.float32)
    after = tl.load(gradient + at + hidden, mask=has_after[:, :, None] & is_channel, other=0.0).to(tl.float32)
    result = (base_own[None] + dynamic_own[:, :, None]) * own + (base_after[None] + dynamic_after[:, :, None]) * after
    tl.store(of_rows + at, result.to(of_rows.dtype.element_ty), mask=whole)
    for tap in tl.static_range(2):
        is_input = whole if tap == 0 else has_before[:, :, None] & is_channel
        product = own * tl.load(rows + at - tap * hidden, mask=is_input, other=0.0).to(tl.float32)
        to = of_dynamic + row[:, None] * (2 * num_groups) + tap * num_groups + group[None, :]
        tl.store(to, tl.sum(product, 2).to(of_dynamic.dtype.element_ty), mask=is_row & is_group)
        to = of_base + (tl.program_id(0).to(tl.int64) * 2 + tap) * hidden + channel[None]
        tl.store(to, tl.sum(product, 0, keep_dims=True), mask=is_channel)


def convolution_backward(
    gradient: Tensor, rows: Tensor, dynamic: Tensor, base: Tensor, is_first: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of rows [R, H], dynamic [R, 2, G] and base [2, H] from that of the output [R, H].

    `is_first` bool [R, 1] marks the rows without a predecessor. Rows of `dynamic` may lie apart; all else is contiguous.
    """
    num_rows, hidden = rows.shape
    group_size = hidden // dynamic.shape[2]
    lanes = triton.next_power_of_2(group_size)
    num_groups = max(1, _CHANNELS // lanes)
    assert gradient.is_contiguous() and rows.is_contiguous() and dynamic[0].is_contiguous() and base.is_contiguous()
    grid = triton.cdiv(num_rows, _ROWS), triton.cdiv(dynamic.shape[2], num_groups)
    of_rows, of_dynamic = torch.empty_like(rows), dynamic.new_empty(dynamic.shape)
    of_base = torch.empty(grid[0], *base.shape, dtype=torch.float32, device=base.device)
    _convolution_backward[grid](
        gradient, rows, dynamic, base, is_first, of_rows, of_dynamic, of_base, num_rows, hidden, dynamic.stride(0),
        GROUP=group_size, ROWS=_ROWS, GROUPS=num_groups, LANES=lanes, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return of_rows, of_dynamic, of_base.sum(0).to(base.dtype)
