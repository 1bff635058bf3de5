"""Attention of block rows over runs of keys on a GPU, with the kernels of `attention_kernel`; imported on a GPU only.

Neighbouring rows see runs of keys with neighbouring edges. So most key tiles are visible to all rows of a tile or to none;
a sweep (see key_runs.py) lists the first and last tile of each phase, and only tiles at the edges are masked.

Shapes, lse and delta are as in `attention_kernel`.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
from torch import Tensor

from common.device.upload import upload
from services.drafter.kernels.attention_kernel import dkdv_kernel, dq_kernel, forward_kernel
from services.drafter.kernels.key_runs import TILE, KeyRuns, sweeps_of_keys, sweeps_of_rows

_LOG2_E = math.log2(math.e)
KeysValues = tuple[Tensor, Tensor]


class Tiling(NamedTuple):
    """Tile sizes of a kernel (rows and keys both divide TILE), warps and pipeline stages."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int


class Tilings(NamedTuple):
    """The tilings of the three kernels, and the number of programs that share the query heads of a context key head."""

    forward: Tiling = Tiling(64, 64, 4, 3)
    dq: Tiling = Tiling(128, 64, 8, 3)
    dkdv: Tiling = Tiling(64, 64, 4, 2)
    num_splits: int = 2


_WIDE_HEADS = Tilings(Tiling(128, 32, 8, 2), Tiling(128, 32, 8, 2), Tiling(32, 64, 8, 2))  # fits shared memory at D = 256


class Visibility(NamedTuple):
    """Runs and sweeps of one attention call, on the device; int32."""

    runs: Tensor  # [4, M]: start, end, own start, own end
    row_sweeps: Tensor  # [ceil(M / TILE), 8]: the sweeps over context tiles, then over own tiles
    context_sweeps: Tensor  # [ceil(T / TILE), 4]: the sweep of each tile of context keys over tiles of rows
    own_sweeps: Tensor  # [ceil(Q / TILE), 4]


class SweptAttention:
    """Implements `attention.Attend`. Nothing is padded, so the numbers of rows may change from call to call."""

    def __init__(
        self, runs: KeyRuns, num_context: int, num_rows: int, device: torch.device, tilings: Tilings | None = None
    ) -> None:
        context, own = sweeps_of_rows(runs.start, runs.end), sweeps_of_rows(runs.own_start, runs.own_end)
        key_sweeps = sweeps_of_keys(context, -(-num_context // TILE)), sweeps_of_keys(own, -(-num_rows // TILE))
        arrays = np.stack(runs), np.concatenate([context, own], axis=1), *key_sweeps
        self._visibility = Visibility(*(upload(array.astype(np.int32), device) for array in arrays))
        self._tilings = tilings

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        tilings = self._tilings or (Tilings() if query.shape[2] <= 128 else _WIDE_HEADS)
        o: Tensor = _Function.apply(query, *context, *own, self._visibility, tilings)  # type: ignore[no-untyped-call]
        return o


class _KeyPart(NamedTuple):
    """Keys and values [Hkv, S, D] of the context or of the block rows, and the rows' runs over them."""

    k: Tensor
    v: Tensor
    starts: Tensor  # int32 [M]
    ends: Tensor
    sweeps: Tensor  # int32 [ceil(S / TILE), 4]
    num_splits: int


class _Function(torch.autograd.Function):
    """Attention: q [Hq, M, D], k, v, k_own, v_own, visibility, tilings -> o [M, Hq * D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, *inputs: Any) -> Tensor:
        *kv, visibility, tilings = inputs
        (heads, num_rows, depth), num_kv_heads = q.shape, kv[0].shape[0]
        o = q.new_empty(num_rows, heads * depth)
        lse = torch.empty(heads, num_rows, dtype=torch.float32, device=q.device)
        rows, keys, num_warps, num_stages = tilings.forward
        forward_kernel[heads, triton.cdiv(num_rows, rows)](
            q, *kv, o, lse, visibility.runs, visibility.row_sweeps, _row_strides(q, *kv),
            num_rows, kv[0].shape[1], kv[2].shape[1], depth**-0.5 * _LOG2_E,
            HEADS=heads, GROUP=heads // num_kv_heads, D=depth, ROWS=rows, KEYS=keys,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        ctx.save_for_backward(q, *kv, o, lse)
        ctx.visibility, ctx.tilings = visibility, tilings
        return o

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Compute dq first: `dq_kernel` also writes delta, which `dkdv_kernel` reads."""
        q, *kv, o, lse = ctx.saved_tensors
        (heads, num_rows, depth), num_kv_heads = q.shape, kv[0].shape[0]
        do, delta, dq = gradients[0].contiguous(), torch.empty_like(lse), torch.empty_like(o)
        visibility, tilings = ctx.visibility, ctx.tilings
        rows, keys, num_warps, num_stages = tilings.dq
        dq_kernel[heads, triton.cdiv(num_rows, rows)](
            q, *kv, o, do, lse, delta, dq, visibility.runs, visibility.row_sweeps, _row_strides(q, *kv),
            num_rows, kv[0].shape[1], kv[2].shape[1], depth**-0.5 * _LOG2_E, depth**-0.5,
            HEADS=heads, GROUP=heads // num_kv_heads, D=depth, ROWS=rows, KEYS=keys,
            num_warps=num_warps, num_stages=num_stages,
        )  # fmt: skip
        start, end, own_start, own_end = visibility.runs
        num_splits = math.gcd(tilings.num_splits, heads // num_kv_heads)
        parts = (
            _KeyPart(kv[0], kv[1], start, end, visibility.context_sweeps, num_splits),
            _KeyPart(kv[2], kv[3], own_start, own_end, visibility.own_sweeps, 1),
        )
        dkdv = [gradient for part in parts for gradient in _dkdv(part, q, do, lse, delta, tilings.dkdv)]
        return dq.view(num_rows, heads, depth).transpose(0, 1), *dkdv, None, None


def _dkdv(part: _KeyPart, q: Tensor, do: Tensor, lse: Tensor, delta: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Return dk and dv [Hkv, S, D]; the results of several splits are added in float32."""
    (heads, num_rows, depth), (num_kv_heads, num_keys, _) = q.shape, part.k.shape
    dtype = torch.float32 if part.num_splits > 1 else q.dtype
    shape = part.num_splits, num_keys, num_kv_heads, depth
    dk, dv = (torch.empty(shape, dtype=dtype, device=q.device) for _ in range(2))
    rows, keys, num_warps, num_stages = tiling
    dkdv_kernel[num_kv_heads * part.num_splits, triton.cdiv(num_keys, keys)](
        q, part.k, part.v, do, lse, delta, dk, dv, part.starts, part.ends, part.sweeps, _row_strides(q, part.k, part.v),
        num_rows, num_keys, depth**-0.5 * _LOG2_E, depth**-0.5,
        HEADS=heads, GROUP=heads // num_kv_heads, SPLITS=part.num_splits, D=depth, ROWS=rows, KEYS=keys,
        num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip
    dk, dv = (split.sum(0) if part.num_splits > 1 else split[0] for split in (dk, dv))
    return dk.to(q.dtype).transpose(0, 1), dv.to(q.dtype).transpose(0, 1)


def _row_strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the elements between rows of each [heads, rows, D], whose rows hold one head after the other."""
    for heads in tensors:
        assert heads.stride(2) == 1 and heads.stride(0) == heads.shape[2], heads.stride()
    return tuple(heads.stride(1) for heads in tensors)
