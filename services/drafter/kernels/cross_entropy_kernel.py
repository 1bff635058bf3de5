"""Triton kernel for the cross entropy of rows of logits, in two passes over them; imported on a GPU only.

Shapes: R rows, V vocabulary.

    logits [R, V]    labels int64 [R]    losses float32 [R]    predictions int64 [R]

    pass 1   each lane keeps the maximum of its columns, its index and the sum of exponentials; the lanes are merged: lse
    pass 2   the logits are overwritten by their gradient, exp(logit - lse), less 1 at the label
"""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK, _NUM_WARPS = 2048, 8  # the fastest of the block sizes tried on an H200; limited by memory bandwidth


@triton.jit  # type: ignore[untyped-decorator]
def _soft_cap(logit, CAP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Compute CAP * tanh(logit / CAP); minus infinity stays, and so does everything for a CAP of 0."""
    if CAP > 0.0:
        logit = tl.where(logit == float("-inf"), logit, CAP - 2.0 * CAP / (1.0 + tl.exp(logit * (2.0 / CAP))))
    return logit


@triton.jit  # type: ignore[untyped-decorator]
def _cross_entropy(  # type: ignore[no-untyped-def]
    logits, labels, losses, predictions, num_columns, CAP: tl.constexpr, GRADIENT: tl.constexpr, BLOCK: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Compute loss and prediction of one row, and its gradient in place if GRADIENT."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    label = tl.load(labels + row)
    label_logit = _soft_cap(tl.load(logits + label).to(tl.float32), CAP)
    lanes = tl.arange(0, BLOCK)
    maximum = tl.full([BLOCK], -1e30, tl.float32)
    argmax = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, num_columns, BLOCK):
        column = first + lanes
        logit = tl.load(logits + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        new_maximum = tl.maximum(maximum, logit)
        capped = _soft_cap(new_maximum, CAP)
        total = total * tl.exp(_soft_cap(maximum, CAP) - capped) + tl.exp(_soft_cap(logit, CAP) - capped)
        argmax = tl.where(logit > maximum, column, argmax)
        maximum = new_maximum
    row_maximum = tl.max(maximum)
    capped = _soft_cap(row_maximum, CAP)
    lse = capped + tl.log(tl.sum(total * tl.exp(_soft_cap(maximum, CAP) - capped)))
    tl.store(losses + row, lse - label_logit)
    tl.store(predictions + row, tl.min(tl.where(maximum == row_maximum, argmax, num_columns)).to(tl.int64))
    if GRADIENT:
        for first in range(0, num_columns, BLOCK):
            column = first + lanes
            valid = column < num_columns
            logit = _soft_cap(tl.load(logits + column, mask=valid, other=0.0).to(tl.float32), CAP)
            p = tl.exp(logit - lse)
            dlogit = tl.where(column == label, p - 1.0, p)
            if CAP > 0.0:
                dlogit *= 1.0 - (logit / CAP) * (logit / CAP)
            tl.store(logits + column, dlogit.to(logits.dtype.element_ty), mask=valid)


def cross_entropy(
    logits: Tensor, labels: Tensor, losses: Tensor, predictions: Tensor, softcap: float = 0.0, *, with_gradient: bool
) -> None:
    """Fill `losses` and `predictions` (the first column with the largest logit, before the cap); float32 inside.

    With a softcap c the logits z count as c * tanh(z / c). With `with_gradient` the logits are overwritten by the gradient of
    their row's loss, else they are kept.
    """
    assert logits.is_contiguous() and losses.is_contiguous() and predictions.is_contiguous()
    num_rows, num_columns = logits.shape
    grid, block = (num_rows,), min(_BLOCK, triton.next_power_of_2(num_columns))
    _cross_entropy[grid](
        logits, labels, losses, predictions, num_columns, CAP=softcap, GRADIENT=with_gradient, BLOCK=block, num_warps=_NUM_WARPS
    )
