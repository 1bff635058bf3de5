"""Triton kernels of `swept_attention`: forward, dq, and dk with dv; imported on a GPU only.

Names follow FlashAttention: q k v o; do dq dk dv are gradients; lse is the log-sum-exp of a row of scores to the base 2;
delta is the row sum of o * do. Keys and values come in two parts: the context (k, v) and the block rows (k_own, v_own).

Shapes: T context rows, Q block rows, M query rows among them, S keys of one part (T or Q), Hq query heads,
Hkv key and value heads, D head_dim, G = Hq / Hkv.

    q, o, do, dq    [M, Hq, D]      k, v, dk, dv            [T, Hkv, D]      lse, delta   float32 [Hq, M]
    runs            int32 [4, M]    k_own, v_own, dk, dv    [Q, Hkv, D]      sweeps       int32 [tiles, 4 or 8]

A row sees one run of keys, so a tile of rows is swept in three phases (see key_runs.py for the tile numbers):

    key tiles     | left edge | middle   | right edge |
                  | masked    | unmasked | masked     |
    sweep         s[0]        s[1]       s[2]         s[3]
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

from services.drafter.kernels.key_runs import TILE

_TILE: tl.constexpr = tl.constexpr(TILE)
_MIN_SCORE: tl.constexpr = tl.constexpr(-1e30)  # finite: -inf minus -inf would be NaN in a row without a key so far


@triton.jit
def _load_rows(rows, index, stride, num_rows, D: tl.constexpr, BOUNDED: tl.constexpr):
    """Load rows `index` of one head, [len(index), D]; rows from `num_rows` on are 0."""
    pointers = rows + index[:, None].to(tl.int64) * stride + tl.arange(0, D)[None, :]
    if BOUNDED:
        return tl.load(pointers, mask=index[:, None] < num_rows, other=0.0)
    return tl.load(pointers)


@triton.jit
def _load_runs(runs, row, num_rows):
    """Load start and end of the context run, then of the own run, of each row."""
    valid = row < num_rows
    start, end = tl.load(runs + row, valid, 0), tl.load(runs + num_rows + row, valid, 0)
    return start, end, tl.load(runs + 2 * num_rows + row, valid, 0), tl.load(runs + 3 * num_rows + row, valid, 0)


@triton.jit
def _attend(
    state, q, k, v, kv_strides, num_keys, start, end, first, last, scale_log2,
    KEYS: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Update (o, row sum, row maximum) with the key tiles from `first` to before `last` by online softmax."""
    o, total, maximum = state
    for offset in range(first * _TILE, last * _TILE, KEYS):
        column = offset + tl.arange(0, KEYS)
        k_tile = _load_rows(k, column, kv_strides[0], num_keys, D, MASKED)
        scores = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * scale_log2
        if MASKED:
            scores = tl.where((column[None, :] >= start[:, None]) & (column[None, :] < end[:, None]), scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        p = tl.exp2(scores - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(p, 1)
        v_tile = _load_rows(v, column, kv_strides[1], num_keys, D, MASKED)
        o = tl.dot(p.to(v_tile.dtype), v_tile, o * rescale[:, None], input_precision="ieee")
        maximum = new_maximum
    return o, total, maximum


@triton.jit(do_not_specialize=["num_rows", "num_context", "num_own"])
def forward_kernel(
    q, k, v, k_own, v_own, o, lse, runs, sweeps, strides, num_rows, num_context, num_own, scale_log2,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute o and lse of a tile of rows of one head. The last tiles see the most keys, so they start first.

    Args (in addition to the legend):
        sweeps: [ceil(M / TILE), 8], four numbers for the context, then four for the own keys.
        strides: elements between rows of q, k, v, k_own and v_own.
        scale_log2: D ** -0.5 * log2(e), because exp2 is cheaper than exp.
    """
    tile, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    valid, kv_head = row < num_rows, head // GROUP * D
    start, end, own_start, own_end = _load_runs(runs, row, num_rows)
    q_tile = _load_rows(q + head * D, row, strides[0], num_rows, D, True)
    state = tl.zeros([ROWS, D], tl.float32), tl.zeros([ROWS], tl.float32), tl.full([ROWS], _MIN_SCORE, tl.float32)
    sweep = sweeps + tile * ROWS // _TILE * 8
    for phase in tl.static_range(3):  # left edge masked, middle unmasked, right edge masked
        state = _attend(
            state, q_tile, k + kv_head, v + kv_head, (strides[1], strides[2]), num_context, start, end,
            tl.load(sweep + phase), tl.load(sweep + phase + 1), scale_log2, KEYS, D, phase != 1,
        )  # fmt: skip
    o_tile, total, maximum = _attend(  # own keys: at most a few tiles, all masked
        state, q_tile, k_own + kv_head, v_own + kv_head, (strides[3], strides[4]), num_own, own_start, own_end,
        tl.load(sweep + 4), tl.load(sweep + 7), scale_log2, KEYS, D, True,
    )  # fmt: skip
    pointers = o + row[:, None].to(tl.int64) * (HEADS * D) + head * D + tl.arange(0, D)[None, :]
    total = tl.where(valid, total, 1.0)
    tl.store(pointers, (o_tile / total[:, None]).to(o.dtype.element_ty), mask=valid[:, None])
    tl.store(lse + head * num_rows + row, maximum + tl.log2(total), mask=valid)


@triton.jit
def _add_dq(
    dq, q, k, v, do, lse, delta, kv_strides, num_keys, start, end, first, last, scale_log2,
    KEYS: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the part of dq, still to be scaled, that comes from the key tiles from `first` to before `last`."""
    for offset in range(first * _TILE, last * _TILE, KEYS):
        column = offset + tl.arange(0, KEYS)
        k_tile = _load_rows(k, column, kv_strides[0], num_keys, D, MASKED)
        v_tile = _load_rows(v, column, kv_strides[1], num_keys, D, MASKED)
        scores = tl.dot(q, tl.trans(k_tile), input_precision="ieee") * scale_log2
        p = tl.exp2(scores - lse[:, None])
        if MASKED:
            visible = (column[None, :] >= start[:, None]) & (column[None, :] < end[:, None])
            p = tl.where(visible, p, 0.0)
        ds = p * (tl.dot(do, tl.trans(v_tile), input_precision="ieee") - delta[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit(do_not_specialize=["num_rows", "num_context", "num_own"])
def dq_kernel(
    q, k, v, k_own, v_own, o, do, lse, delta, dq, runs, sweeps, strides, num_rows, num_context, num_own, scale_log2, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute dq of a tile of rows of one head, and delta, which `dkdv_kernel` needs. Arguments as in `forward_kernel`."""
    tile, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    valid, kv_head = row < num_rows, head // GROUP * D
    start, end, own_start, own_end = _load_runs(runs, row, num_rows)
    q_tile = _load_rows(q + head * D, row, strides[0], num_rows, D, True)
    do_tile = _load_rows(do + head * D, row, HEADS * D, num_rows, D, True)
    o_tile = _load_rows(o + head * D, row, HEADS * D, num_rows, D, True)
    delta_tile = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    tl.store(delta + head * num_rows + row, delta_tile, mask=valid)
    lse_tile = tl.load(lse + head * num_rows + row, valid, 0.0)
    dq_tile = tl.zeros([ROWS, D], tl.float32)
    sweep = sweeps + tile * ROWS // _TILE * 8
    for phase in tl.static_range(3):  # left edge masked, middle unmasked, right edge masked
        dq_tile = _add_dq(
            dq_tile, q_tile, k + kv_head, v + kv_head, do_tile, lse_tile, delta_tile, (strides[1], strides[2]), num_context,
            start, end, tl.load(sweep + phase), tl.load(sweep + phase + 1), scale_log2, KEYS, D, phase != 1,
        )  # fmt: skip
    dq_tile = _add_dq(  # own keys: at most a few tiles, all masked
        dq_tile, q_tile, k_own + kv_head, v_own + kv_head, do_tile, lse_tile, delta_tile, (strides[3], strides[4]), num_own,
        own_start, own_end, tl.load(sweep + 4), tl.load(sweep + 7), scale_log2, KEYS, D, True,
    )  # fmt: skip
    pointers = dq + row[:, None].to(tl.int64) * (HEADS * D) + head * D + tl.arange(0, D)[None, :]
    tl.store(pointers, (dq_tile * scale).to(dq.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _add_dkdv(
    dk, dv, k, v, column, q, do, lse, delta, starts, ends, q_stride, do_stride, num_rows, first, last, scale_log2,
    ROWS: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the parts of dk, still to be scaled, and dv that come from the row tiles from `first` to before `last`.

    Rows from `num_rows` on load q = do = 0, so they add nothing.
    """
    for offset in range(first * _TILE, last * _TILE, ROWS):
        row = offset + tl.arange(0, ROWS)
        valid = row < num_rows
        q_tile = _load_rows(q, row, q_stride, num_rows, D, True)
        do_tile = _load_rows(do, row, do_stride, num_rows, D, True)
        lse_tile, delta_tile = tl.load(lse + row, valid, 0.0), tl.load(delta + row, valid, 0.0)
        scores = tl.dot(k, tl.trans(q_tile), input_precision="ieee") * scale_log2
        p = tl.exp2(scores - lse_tile[None, :])
        if MASKED:
            start, end = tl.load(starts + row, valid, 0), tl.load(ends + row, valid, 0)
            p = tl.where((column[:, None] >= start[None, :]) & (column[:, None] < end[None, :]), p, 0.0)
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
        ds = p * (tl.dot(v, tl.trans(do_tile), input_precision="ieee") - delta_tile[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["num_rows", "num_keys"])
def dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, starts, ends, sweeps, strides, num_rows, num_keys, scale_log2, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of a tile of keys of one key head, summed over G / SPLITS of the query heads that share it.

    Args (in addition to the legend):
        k, v: of one part, context or own; starts and ends [M] are the runs over this part.
        sweeps: [ceil(S / TILE), 4], over tiles of rows.
        dk, dv: [SPLITS, S, Hkv, D].
        strides: elements between rows of q, k and v.
    """
    kv_head, split, tile = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS, tl.program_id(1)
    column = tile * KEYS + tl.arange(0, KEYS)
    k_tile = _load_rows(k + kv_head * D, column, strides[1], num_keys, D, True)
    v_tile = _load_rows(v + kv_head * D, column, strides[2], num_keys, D, True)
    dk_tile, dv_tile = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    sweep = sweeps + tile * KEYS // _TILE * 4
    for index in range(GROUP // SPLITS):
        head = kv_head * GROUP + split * (GROUP // SPLITS) + index
        for phase in tl.static_range(3):  # left edge masked, middle unmasked, right edge masked
            dk_tile, dv_tile = _add_dkdv(
                dk_tile, dv_tile, k_tile, v_tile, column, q + head * D, do + head * D, lse + head * num_rows,
                delta + head * num_rows, starts, ends, strides[0], HEADS * D, num_rows,
                tl.load(sweep + phase), tl.load(sweep + phase + 1), scale_log2, ROWS, D, phase != 1,
            )  # fmt: skip
    row = split.to(tl.int64) * num_keys + column[:, None]
    offsets = row * (HEADS // GROUP * D) + kv_head * D + tl.arange(0, D)[None, :]
    valid = column[:, None] < num_keys
    tl.store(dk + offsets, (dk_tile * scale).to(dk.dtype.element_ty), mask=valid)
    tl.store(dv + offsets, dv_tile.to(dv.dtype.element_ty), mask=valid)
