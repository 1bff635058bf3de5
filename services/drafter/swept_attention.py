"""Attention of block rows over runs of keys on a GPU, with the kernels of `attention_kernel`; imported on a GPU only.

The context that a tile of rows sees is a staircase: its tiles in the middle are in whole sight, those at its edges are
cut. A sweep says where, so no tile is visited in vain and only cut ones are masked.

Shapes: T context rows, Q block rows, M query rows among them, S keys of a side (T or Q), Hq query heads,
Hkv key and value heads, D head_dim.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from services.drafter.attention_kernel import of_keys_kernel, of_query_kernel, output_kernel
from services.drafter.upload import upload
from services.drafter.visibility import TILE, KeyRuns, sweeps_of_keys, sweeps_of_rows

_LOG2_E = math.log2(math.e)
KeysValues = tuple[Tensor, Tensor]


class Tiling(NamedTuple):
    """How a kernel is cut: rows and keys of a step (both divide TILE), warps, steps in flight."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Tilings(NamedTuple):
    """Of the three kernels, and how many programs share the query heads of a key head over context keys."""

    output: Tiling = Tiling(64, 64, 4, 3)
    of_query: Tiling = Tiling(128, 64, 8, 3)
    of_keys: Tiling = Tiling(64, 64, 4, 2)
    num_splits: int = 2


_WIDE_HEADS = Tilings(Tiling(128, 32, 8, 2), Tiling(128, 32, 8, 2), Tiling(32, 64, 8, 2))  # what fits for D = 256


class Sight(NamedTuple):
    """Who sees what, on the device; int32."""

    runs: Tensor  # [4, M]: start, end, own start, own end
    of_rows: Tensor  # [ceil(M / TILE), 8]: the sweeps over context tiles, then over own tiles
    of_context: Tensor  # [ceil(T / TILE), 4]: the sweep of each tile of context keys over tiles of rows
    of_own: Tensor  # [ceil(Q / TILE), 4]


class SweptAttention:
    """See `attention.Attend`; nothing is padded, so the numbers of rows may change from call to call."""

    def __init__(
        self, runs: KeyRuns, num_context: int, num_rows: int, device: torch.device, tilings: Tilings | None = None
    ) -> None:
        context, own = sweeps_of_rows(runs.start, runs.end), sweeps_of_rows(runs.own_start, runs.own_end)
        sides = sweeps_of_keys(context, -(-num_context // TILE)), sweeps_of_keys(own, -(-num_rows // TILE))
        arrays = np.stack(runs), np.concatenate([context, own], axis=1), *sides
        self._sight = Sight(*(upload(array.astype(np.int32), device) for array in arrays))
        self._tilings = tilings

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        """See `attention.Attend`."""
        tilings = self._tilings or (Tilings() if query.shape[2] <= 128 else _WIDE_HEADS)
        output: Tensor = _Function.apply(query, *context, *own, self._sight, tilings)  # type: ignore[no-untyped-call]
        return output


class _Side(NamedTuple):
    """Keys and values [Hkv, S, D] with the runs of the rows over them."""

    key: Tensor
    value: Tensor
    starts: Tensor  # int32 [M]
    ends: Tensor
    sweeps: Tensor  # int32 [ceil(S / TILE), 4]
    num_splits: int


class _Function(torch.autograd.Function):
    """query [Hq, M, D], context key and value, own key and value, sight, tilings -> [M, Hq * D]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, *rest: Any) -> Tensor:
        """The output, and the logarithm (to the base 2) of the sum of every row's exponentials."""
        *keys_values, sight, tilings = rest
        (heads, num_rows, depth), num_key_heads = query.shape, keys_values[0].shape[0]
        output = query.new_empty(num_rows, heads * depth)
        normaliser = torch.empty(heads, num_rows, dtype=torch.float32, device=query.device)
        rows, keys, num_warps, num_stages = tilings.output
        output_kernel[heads, triton.cdiv(num_rows, rows)](
            query, *keys_values, output, normaliser, sight.runs, sight.of_rows,
            *(_row_stride(part) for part in (query, *keys_values)), num_rows, keys_values[0].shape[1], keys_values[2].shape[1],
            depth**-0.5 * _LOG2_E, HEADS=heads, GROUP=heads // num_key_heads, D=depth, ROWS=rows, KEYS=keys,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        ctx.save_for_backward(query, *keys_values, output, normaliser)
        ctx.sight, ctx.tilings = sight, tilings
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The query's gradient first: its kernel leaves what that of the keys needs."""
        query, *keys_values, output, normaliser = ctx.saved_tensors
        (heads, num_rows, depth), num_key_heads = query.shape, keys_values[0].shape[0]
        gradient, inner, result = gradients[0].contiguous(), torch.empty_like(normaliser), torch.empty_like(output)
        sight, tilings = ctx.sight, ctx.tilings
        rows, keys, num_warps, num_stages = tilings.of_query
        of_query_kernel[heads, triton.cdiv(num_rows, rows)](
            query, *keys_values, output, gradient, normaliser, inner, result, sight.runs, sight.of_rows,
            *(_row_stride(part) for part in (query, *keys_values)), num_rows, keys_values[0].shape[1], keys_values[2].shape[1],
            depth**-0.5 * _LOG2_E, depth**-0.5, HEADS=heads, GROUP=heads // num_key_heads, D=depth, ROWS=rows, KEYS=keys,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        start, end, own_start, own_end = sight.runs
        num_splits = math.gcd(tilings.num_splits, heads // num_key_heads)
        sides = (
            _Side(keys_values[0], keys_values[1], start, end, sight.of_context, num_splits),
            _Side(keys_values[2], keys_values[3], own_start, own_end, sight.of_own, 1),
        )
        of_keys = [part for side in sides for part in _of_keys(side, query, gradient, normaliser, inner, tilings.of_keys)]
        return result.view(num_rows, heads, depth).transpose(0, 1), *of_keys, None, None


def _of_keys(
    side: _Side, query: Tensor, gradient: Tensor, normaliser: Tensor, inner: Tensor, tiling: Tiling
) -> tuple[Tensor, Tensor]:
    """The gradients [Hkv, S, D] of keys and values; the parts of several programs are added up in float32."""
    (heads, num_rows, depth), (num_key_heads, num_keys, _) = query.shape, side.key.shape
    dtype = torch.float32 if side.num_splits > 1 else query.dtype
    shape = side.num_splits, num_keys, num_key_heads, depth
    of_key, of_value = (torch.empty(shape, dtype=dtype, device=query.device) for _ in range(2))
    rows, keys, num_warps, num_stages = tiling
    of_keys_kernel[num_key_heads * side.num_splits, triton.cdiv(num_keys, keys)](
        query, side.key, side.value, gradient, normaliser, inner, of_key, of_value, side.starts, side.ends, side.sweeps,
        *(_row_stride(part) for part in (query, side.key, side.value)), num_rows, num_keys,
        depth**-0.5 * _LOG2_E, depth**-0.5, HEADS=heads, GROUP=heads // num_key_heads, SPLITS=side.num_splits, D=depth,
        ROWS=rows, KEYS=keys, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    of_key, of_value = (part.sum(0) if side.num_splits > 1 else part[0] for part in (of_key, of_value))
    return of_key.to(query.dtype).transpose(0, 1), of_value.to(query.dtype).transpose(0, 1)


def _row_stride(heads: Tensor) -> int:
    """Of [heads, rows, D] whose rows hold one head after the other."""
    assert heads.stride(2) == 1 and heads.stride(0) == heads.shape[2], heads.stride()
    return heads.stride(1)
