"""The kernels of `swept_attention`, in Triton; imported on a GPU only.

The keys of a tile of rows are a staircase: tiles in whole sight in the middle, cut ones at its edges, and the rows' own
blocks. Sweeps say where (see visibility.py), so no key tile is visited in vain and only the cut ones are masked.

Shapes: T context rows, Q block rows, M query rows among them, S keys of a side (T or Q), Hq query heads,
Hkv key and value heads, D head_dim, G = Hq / Hkv.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# ruff: noqa: N803

import triton
import triton.language as tl

from services.drafter.visibility import TILE

_LOWEST: tl.constexpr = tl.constexpr(-1e30)
_EDGE: tl.constexpr = tl.constexpr(TILE)


@triton.jit
def _load(rows, index, row_stride, num_rows, D: tl.constexpr, BOUNDED: tl.constexpr):
    """The rows numbered `index` of one head, [len(index), D]; 0 from `num_rows` on."""
    places = rows + index[:, None].to(tl.int64) * row_stride + tl.arange(0, D)[None, :]
    if BOUNDED:
        return tl.load(places, mask=index[:, None] < num_rows, other=0.0)
    return tl.load(places)


@triton.jit
def _take_in(
    state, query, keys, values, key_stride, value_stride, num_keys, start, end, first, last,
    scale, KEYS: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Take in the key tiles from `first` to before `last`; scores are in powers of two."""
    output, total, largest = state
    for position in range(first * _EDGE, last * _EDGE, KEYS):
        column = position + tl.arange(0, KEYS)
        key = _load(keys, column, key_stride, num_keys, D, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if MASKED:
            scores = tl.where((column[None, :] >= start[:, None]) & (column[None, :] < end[:, None]), scores, float("-inf"))
        larger = tl.maximum(largest, tl.max(scores, 1))
        probability = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(probability, 1)
        value = _load(values, column, value_stride, num_keys, D, MASKED)
        output = tl.dot(probability.to(value.dtype), value, output * shrink[:, None], input_precision="ieee")
        largest = larger
    return output, total, largest


@triton.jit(do_not_specialize=["num_rows", "num_context", "num_own"])
def output_kernel(
    query, context_key, context_value, own_key, own_value, output, normaliser, runs, of_rows,
    query_stride, ck_stride, cv_stride, ok_stride, ov_stride, num_rows, num_context, num_own, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one head; the tiles with the most keys come first."""
    tile, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside, side = row < num_rows, head // GROUP * D
    start, end = tl.load(runs + row, inside, 0), tl.load(runs + num_rows + row, inside, 0)
    own_start, own_end = tl.load(runs + 2 * num_rows + row, inside, 0), tl.load(runs + 3 * num_rows + row, inside, 0)
    asked = _load(query + head * D, row, query_stride, num_rows, D, True)
    state = tl.zeros([ROWS, D], tl.float32), tl.zeros([ROWS], tl.float32), tl.full([ROWS], _LOWEST, tl.float32)
    sweep = of_rows + tile * ROWS // _EDGE * 8
    keys, values = context_key + side, context_value + side
    for part in tl.static_range(3):
        state = _take_in(
            state, asked, keys, values, ck_stride, cv_stride, num_context, start, end,
            tl.load(sweep + part), tl.load(sweep + part + 1), scale, KEYS, D, part != 1,
        )  # fmt: skip
    keys, values, first, last = own_key + side, own_value + side, tl.load(sweep + 4), tl.load(sweep + 7)
    result, total, largest = _take_in(
        state, asked, keys, values, ok_stride, ov_stride, num_own, own_start, own_end, first, last, scale, KEYS, D, True
    )
    places = output + row[:, None].to(tl.int64) * (HEADS * D) + head * D + tl.arange(0, D)[None, :]
    total = tl.where(inside, total, 1.0)
    tl.store(places, (result / total[:, None]).to(output.dtype.element_ty), mask=inside[:, None])
    tl.store(normaliser + head * num_rows + row, largest + tl.log2(total), mask=inside)


@triton.jit
def _add_of_query(
    result, query, gradient, normaliser, inner, keys, values, key_stride, value_stride, num_keys, start, end, first, last,
    scale, KEYS: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the key tiles' part of the gradient of the query, without its last factor."""
    for position in range(first * _EDGE, last * _EDGE, KEYS):
        column = position + tl.arange(0, KEYS)
        key = _load(keys, column, key_stride, num_keys, D, MASKED)
        value = _load(values, column, value_stride, num_keys, D, MASKED)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        probability = tl.exp2(scores - normaliser[:, None])
        if MASKED:
            seen = (column[None, :] >= start[:, None]) & (column[None, :] < end[:, None])
            probability = tl.where(seen, probability, 0.0)
        error = probability * (tl.dot(gradient, tl.trans(value), input_precision="ieee") - inner[:, None])
        result = tl.dot(error.to(key.dtype), key, result, input_precision="ieee")
    return result


@triton.jit(do_not_specialize=["num_rows", "num_context", "num_own"])
def of_query_kernel(
    query, context_key, context_value, own_key, own_value, output, gradient, normaliser, inner, result, runs, of_rows,
    query_stride, ck_stride, cv_stride, ok_stride, ov_stride, num_rows, num_context, num_own, scale, factor,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile of rows of one head, and the inner products of output and gradient for `of_keys_kernel`."""
    tile, head = tl.num_programs(1) - 1 - tl.program_id(1), tl.program_id(0)
    row = tile * ROWS + tl.arange(0, ROWS)
    inside, side = row < num_rows, head // GROUP * D
    start, end = tl.load(runs + row, inside, 0), tl.load(runs + num_rows + row, inside, 0)
    own_start, own_end = tl.load(runs + 2 * num_rows + row, inside, 0), tl.load(runs + 3 * num_rows + row, inside, 0)
    asked = _load(query + head * D, row, query_stride, num_rows, D, True)
    above = _load(gradient + head * D, row, HEADS * D, num_rows, D, True)
    below = _load(output + head * D, row, HEADS * D, num_rows, D, True)
    product = tl.sum(above.to(tl.float32) * below.to(tl.float32), 1)
    tl.store(inner + head * num_rows + row, product, mask=inside)
    power = tl.load(normaliser + head * num_rows + row, inside, 0.0)
    total = tl.zeros([ROWS, D], tl.float32)
    sweep = of_rows + tile * ROWS // _EDGE * 8
    keys, values = context_key + side, context_value + side
    for part in tl.static_range(3):
        total = _add_of_query(
            total, asked, above, power, product, keys, values, ck_stride, cv_stride, num_context, start, end,
            tl.load(sweep + part), tl.load(sweep + part + 1), scale, KEYS, D, part != 1,
        )  # fmt: skip
    keys, values, first, last = own_key + side, own_value + side, tl.load(sweep + 4), tl.load(sweep + 7)
    total = _add_of_query(
        total, asked, above, power, product, keys, values, ok_stride, ov_stride, num_own, own_start, own_end, first, last,
        scale, KEYS, D, True,
    )  # fmt: skip
    places = result + row[:, None].to(tl.int64) * (HEADS * D) + head * D + tl.arange(0, D)[None, :]
    tl.store(places, (total * factor).to(result.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _add_of_keys(
    of_key, of_value, key, value, column, query, gradient, normaliser, inner, starts, ends,
    query_stride, gradient_stride, num_rows, first, last, scale,
    ROWS: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add the row tiles' part of both gradients of a tile of keys; what lies behind the last row adds 0."""
    for position in range(first * _EDGE, last * _EDGE, ROWS):
        row = position + tl.arange(0, ROWS)
        inside = row < num_rows
        asked = _load(query, row, query_stride, num_rows, D, True)
        above = _load(gradient, row, gradient_stride, num_rows, D, True)
        power, product = tl.load(normaliser + row, inside, 0.0), tl.load(inner + row, inside, 0.0)
        scores = tl.dot(key, tl.trans(asked), input_precision="ieee") * scale
        probability = tl.exp2(scores - power[None, :])
        if MASKED:
            start, end = tl.load(starts + row, inside, 0), tl.load(ends + row, inside, 0)
            probability = tl.where((column[:, None] >= start[None, :]) & (column[:, None] < end[None, :]), probability, 0.0)
        of_value = tl.dot(probability.to(above.dtype), above, of_value, input_precision="ieee")
        error = probability * (tl.dot(value, tl.trans(above), input_precision="ieee") - product[None, :])
        of_key = tl.dot(error.to(asked.dtype), asked, of_key, input_precision="ieee")
    return of_key, of_value


@triton.jit(do_not_specialize=["num_rows", "num_keys"])
def of_keys_kernel(
    query, keys, values, gradient, normaliser, inner, of_keys, of_values, starts, ends, sweeps,
    query_stride, key_stride, value_stride, num_rows, num_keys, scale, factor, HEADS: tl.constexpr,
    GROUP: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Both gradients of a tile of keys of one key head, from its part of the group's query heads."""
    head, split, tile = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS, tl.program_id(1)
    column = tile * KEYS + tl.arange(0, KEYS)
    key = _load(keys + head * D, column, key_stride, num_keys, D, True)
    value = _load(values + head * D, column, value_stride, num_keys, D, True)
    of_key, of_value = tl.zeros([KEYS, D], tl.float32), tl.zeros([KEYS, D], tl.float32)
    sweep = sweeps + tile * KEYS // _EDGE * 4
    for place in range(GROUP // SPLITS):
        asking = head * GROUP + split * (GROUP // SPLITS) + place
        rows, above = query + asking * D, gradient + asking * D
        power, product = normaliser + asking * num_rows, inner + asking * num_rows
        for part in tl.static_range(3):
            of_key, of_value = _add_of_keys(
                of_key, of_value, key, value, column, rows, above, power, product, starts, ends, query_stride, HEADS * D,
                num_rows, tl.load(sweep + part), tl.load(sweep + part + 1), scale, ROWS, D, part != 1,
            )  # fmt: skip
    side = (split.to(tl.int64) * num_keys + column[:, None]) * (HEADS // GROUP * D) + head * D + tl.arange(0, D)[None, :]
    inside = column[:, None] < num_keys
    tl.store(of_keys + side, (of_key * factor).to(of_keys.dtype.element_ty), mask=inside)
    tl.store(of_values + side, of_value.to(of_values.dtype.element_ty), mask=inside)
