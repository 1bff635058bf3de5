"""Triton kernel that packs one tap: gather, convert, store and checksum in one pass; imported on a GPU only.

B rows, S padded length, T real tokens of all rows, H hidden size.

    tap [B, S, H]    token_index int32 [T], into B * S    packed [T, H], rows STRIDE elements apart    checksum int64 []
"""

import torch
import triton
import triton.language as tl

_TOKENS, _BLOCK, _NUM_WARPS = 4, 1024, 8  # a program packs four tokens, 16 elements per thread at a time
_INTEGERS = {1: tl.int8, 2: tl.int16, 4: tl.int32}


@triton.jit(do_not_specialize=["num_tokens"])  # type: ignore[untyped-decorator]
def _pack(  # type: ignore[no-untyped-def]
    tap,
    token_index,
    packed,
    checksum,
    num_tokens,
    HIDDEN: tl.constexpr,  # noqa: N803
    STRIDE: tl.constexpr,  # noqa: N803
    INTEGER: tl.constexpr,  # noqa: N803
    TOKENS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Pack TOKENS tokens. Each lane adds up the bits that it stored; integer sums are exact, so their order is free."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    valid_token = token < num_tokens
    source = tl.load(token_index + token, mask=valid_token, other=0).to(tl.int64)
    total = tl.zeros([TOKENS, BLOCK], tl.int64)
    for first in range(0, HIDDEN, BLOCK):
        column = first + tl.arange(0, BLOCK)
        valid = valid_token[:, None] & (column < HIDDEN)[None, :]
        value = tl.load(tap + source[:, None] * HIDDEN + column[None, :], mask=valid, other=0.0)
        value = value.to(packed.dtype.element_ty)
        tl.store(packed + token[:, None] * STRIDE + column[None, :], value, mask=valid)
        total += value.to(INTEGER, bitcast=True).to(tl.int64)
    tl.atomic_add(checksum, tl.sum(tl.sum(total, 1), 0))


def pack(tap: torch.Tensor, token_index: torch.Tensor, packed: torch.Tensor, checksum: torch.Tensor) -> None:
    """Implement `services.target.pack.pack` on the current stream."""
    num_tokens, hidden = packed.shape
    assert tap.is_contiguous() and token_index.is_contiguous() and packed.stride(1) == 1
    block = min(_BLOCK, triton.next_power_of_2(hidden))
    _pack[(triton.cdiv(num_tokens, _TOKENS),)](
        tap,
        token_index,
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
