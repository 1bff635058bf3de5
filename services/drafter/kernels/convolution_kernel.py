"""Triton kernel for the backward pass of a convolution within blocks, in one pass over its rows.

Shapes: R rows, H hidden, G groups of H / G neighbouring channels, 2 taps (the row, its predecessor in the block).

    output[r] = (base[0] + dynamic[r, 0]) * rows[r] + (base[1] + dynamic[r, 1]) * rows[r - 1]

Compiled code would read gradient and rows once for each of the three results, which are sums along different dimensions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_STRIP, _ROWS, _CHANNELS, _NUM_WARPS = 64, 4, 128, 2  # the fastest of nine choices on an H200


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _convolution_backward(  # type: ignore[no-untyped-def]
    gradient, rows, dynamic, base, is_first, of_rows, of_dynamic, of_base, num_rows, hidden, dynamic_stride,
    GROUP: tl.constexpr, STRIP: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, LANES: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Compute the gradients of a strip of rows, ROWS at a time, in GROUPS groups; that of the base is a sum over the strip."""
    num_groups, start = hidden // GROUP, tl.program_id(0).to(tl.int64) * STRIP
    group, lane = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS), tl.arange(0, LANES)
    channel, is_group = group[:, None] * GROUP + lane[None, :], (group < num_groups)[None, :]
    is_channel = ((group < num_groups)[:, None] & (lane < GROUP)[None, :])[None]
    base_own = tl.load(base + channel[None], mask=is_channel, other=0.0).to(tl.float32)
    base_after = tl.load(base + hidden + channel[None], mask=is_channel, other=0.0).to(tl.float32)
    of_base_own = tl.zeros([ROWS, GROUPS, LANES], tl.float32)
    of_base_before = tl.zeros([ROWS, GROUPS, LANES], tl.float32)
    gradient, rows, of_rows = gradient + start * hidden, rows + start * hidden, of_rows + start * hidden
    dynamic, of_dynamic, is_first = dynamic + start * dynamic_stride, of_dynamic + start * 2 * num_groups, is_first + start
    num_left = (num_rows - start).to(tl.int32)
    for first in range(0, STRIP, ROWS):
        row = first + tl.arange(0, ROWS)
        is_row = (row < num_left)[:, None]
        has_before = (tl.load(is_first + row, mask=row < num_left, other=1) == 0)[:, None, None]
        has_after = (tl.load(is_first + row + 1, mask=row + 1 < num_left, other=1) == 0)[:, None]
        weight = dynamic + row[:, None] * dynamic_stride + group[None, :]
        dynamic_own = tl.load(weight, mask=is_row & is_group, other=0.0)[:, :, None]
        dynamic_after = tl.load(weight + dynamic_stride + num_groups, mask=has_after & is_group, other=0.0)[:, :, None]
        at, whole = row[:, None, None] * hidden + channel[None], is_row[:, :, None] & is_channel
        own = tl.load(gradient + at, mask=whole, other=0.0).to(tl.float32)
        after = tl.load(gradient + at + hidden, mask=has_after[:, :, None] & is_channel, other=0.0).to(tl.float32)
        result = (base_own + dynamic_own) * own + (base_after + dynamic_after) * after
        tl.store(of_rows + at, result.to(of_rows.dtype.element_ty), mask=whole)
        of_own = own * tl.load(rows + at, mask=whole, other=0.0)
        of_before = own * tl.load(rows + at - hidden, mask=has_before & is_channel, other=0.0)
        to = of_dynamic + row[:, None] * 2 * num_groups + group[None, :]
        tl.store(to, tl.sum(of_own, 2).to(of_dynamic.dtype.element_ty), mask=is_row & is_group)
        tl.store(to + num_groups, tl.sum(of_before, 2).to(of_dynamic.dtype.element_ty), mask=is_row & is_group)
        of_base_own += of_own
        of_base_before += of_before
    to = of_base + tl.program_id(0).to(tl.int64) * 2 * hidden + channel[None]
    tl.store(to, tl.sum(of_base_own, 0, keep_dims=True), mask=is_channel)
    tl.store(to + hidden, tl.sum(of_base_before, 0, keep_dims=True), mask=is_channel)


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
    grid = triton.cdiv(num_rows, _STRIP), triton.cdiv(dynamic.shape[2], num_groups)
    of_rows, of_dynamic = torch.empty_like(rows), dynamic.new_empty(dynamic.shape)
    of_base = torch.empty(grid[0], *base.shape, dtype=torch.float32, device=base.device)
    _convolution_backward[grid](
        gradient, rows, dynamic, base, is_first, of_rows, of_dynamic, of_base, num_rows, hidden, dynamic.stride(0),
        GROUP=group_size, STRIP=_STRIP, ROWS=_ROWS, GROUPS=num_groups, LANES=lanes, num_warps=_NUM_WARPS,
    )  # fmt: skip
    return of_rows, of_dynamic, of_base.sum(0).to(base.dtype)
