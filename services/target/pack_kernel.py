"""Packing of one tap as a Triton kernel: gathered, converted, stored and summed in one pass; imported on a GPU only.

B rows, S padded length, T real tokens of all rows, H hidden size.
"""

import torch
import triton
import triton.language as tl

_TOKENS, _BLOCK, _NUM_WARPS = 4, 1024, 8  # 16 elements a thread; a program packs four tokens
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _pack(  # type: ignore[no-untyped-def]
    tap,
    places,
    packed,
    checksum,
    num_tokens,
    HIDDEN: tl.constexpr,  # noqa: N803
    STRIDE: tl.constexpr,  # noqa: N803
    INTEGER: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Some tokens, all columns. Every lane sums the bits that it stored; the sum is exact, so no order matters."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    place = tl.load(places + token, mask=there, other=0).to(tl.int64)
    total = tl.zeros([TOKENS, BLOCK], tl.int64)
    for first in range(0, HIDDEN, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside = there[:, None] & (column < HIDDEN)[None, :]
        value = tl.load(tap + place[:, None] * HIDDEN + column[None, :], mask=inside, other=0.0)
        value = value.to(packed.dtype.element_ty)
        tl.store(packed + token[:, None] * STRIDE + column[None, :], value, mask=inside)
        total += value.to(INTEGER, bitcast=True).to(tl.int64)
    tl.atomic_add(checksum, tl.sum(tl.sum(total, 1), 0))


def pack(tap: torch.Tensor, places: torch.Tensor, packed: torch.Tensor, checksum: torch.Tensor) -> None:
    """As `services.target.pack.pack`, on the current stream."""
    num_tokens, hidden = packed.shape
    assert tap.is_contiguous() and places.is_contiguous() and packed.stride(1) == 1
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    _pack[(triton.cdiv(num_tokens, _TOKENS),)](
        tap,
        places,
        packed,
        checksum,
        num_tokens,
        HIDDEN=hidden,
        STRIDE=packed.stride(0),
        INTEGER=_INTEGERS[packed.element_size()],
        TOKENS=_TOKENS,
        BLOCK=block,
        num_warps=_NUM_WARPS,
    )
