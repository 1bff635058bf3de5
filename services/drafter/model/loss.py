"""Cross entropy through the target's frozen head, in chunks of rows, and the weights of its rows.

The logits never exist all at once, and the head has no gradient: two matrix products, not three; softmax is in float32.
Shapes: R labelled rows (may be 0), H hidden, V vocabulary, N blocks, B block size, K candidates.
"""

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from common.config import TrainConfig
from services.drafter.kernels.fp8_head import Fp8Head
from services.drafter.kernels.fused import fused
from services.drafter.model.selector import Candidates, soft_cap, top_candidates

Head = Tensor | Fp8Head
DPACE_SMOOTHING = 0.5  # alpha of D-PACE


def decay_weights(block_size: int, gamma: float) -> NDArray[np.float32]:
    """Return the weight exp(-(k - 1) / gamma) of slots k = 1 .. B - 1 (arXiv 2602.06036): [B - 1]."""
    return np.exp(-np.arange(block_size - 1) / gamma).astype(np.float32)


@torch.no_grad()
def dpace_weights(losses: Tensor, label_mask: Tensor) -> Tensor:
    """Return the weights of D-PACE: the gain in expected accepted drafts per gain in a slot's log-probability.

    Losses [N, B - 1] are -log p(label). With q = (1 - alpha) * p(label) + alpha, the weight of slot i is the sum over
    j >= i of the product of q over the slots up to j. Slots without a label neither count nor stop a product.
    """
    smoothed = (1.0 - DPACE_SMOOTHING) * torch.exp(-losses) + DPACE_SMOOTHING
    reached = torch.where(label_mask, smoothed, 1.0).cumprod(1) * label_mask
    return reached.flip(1).cumsum(1).flip(1) * label_mask


def selector_weight(step: int, num_steps: int, train: TrainConfig) -> float:
    """Return the weight of the selector's loss in step 0 .. num_steps - 1: 0 at first, then rising linearly, then constant."""
    since = step - train.selector_warmup_ratio * num_steps
    if since < 0:
        return 0.0
    return train.selector_weight * min(1.0, (since + 1) / max(1.0, train.selector_ramp_ratio * num_steps))


def loss_head(weight: Tensor, kind: Literal["exact", "fp8_logits", "fp8"]) -> Head:
    """Return the head [V, H] in the form that `frozen_head_loss` uses."""
    return weight if kind == "exact" else Fp8Head(weight, gradient_in_fp8=kind == "fp8")


class HeadLoss(NamedTuple):
    """The results of the head for every labelled row."""

    losses: Tensor  # float32 [R], cross entropy; differentiable
    predictions: Tensor  # int64 [R], greedy
    candidates: Candidates  # [R, K]; their logits are differentiable


def frozen_head_loss(
    hidden: Tensor, head: Head, labels: Tensor, chunk_rows: int, num_candidates: int = 1, softcap: float = 0.0
) -> HeadLoss:
    """Return the loss of every row of hidden states [R, H], its prediction and its candidates; see `soft_cap` of selector.py.

    All is differentiable in `hidden` only. The gradient of the cross entropy is made together with the loss, in chunks of rows
    whose logits exist at a time, so the backward pass needs no logits: it scales each row by the gradient of the row's loss.
    The gradient of a candidate's logit before its cap is its row of the head.
    """
    results = _FrozenHeadCrossEntropy.apply(hidden, head, labels, chunk_rows, num_candidates, softcap)  # type: ignore[no-untyped-call]
    losses, predictions, *candidates = results
    return HeadLoss(losses, predictions, Candidates(*candidates))


class _FrozenHeadCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Head, labels: Tensor, chunk_rows: int, num_candidates: int, softcap: float
    ) -> tuple[Tensor, ...]:
        losses = torch.empty(labels.shape, dtype=torch.float32, device=hidden.device)
        predictions = torch.empty_like(labels)
        tokens = labels.new_empty(len(labels), num_candidates)
        candidates = Candidates(tokens, losses.new_empty(tokens.shape))
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for first in range(0, hidden.shape[0], chunk_rows):
            rows = slice(first, first + chunk_rows)
            logits = head.logits(hidden[rows]) if isinstance(head, Fp8Head) else hidden[rows].to(head.dtype) @ head.T
            if num_candidates > 1:
                candidates.tokens[rows], candidates.logits[rows] = top_candidates(logits, num_candidates, softcap)
            cross_entropy(logits, labels[rows], losses[rows], predictions[rows], softcap, with_gradient=gradient is not None)
            if gradient is not None:
                gradient[rows] = head.gradient(logits, labels[rows]) if isinstance(head, Fp8Head) else logits @ head
        if num_candidates == 1:
            candidates.tokens[:, 0], candidates.logits[:] = predictions, 0.0
        ctx.mark_non_differentiable(predictions, candidates.tokens)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(gradient, *candidates)
        ctx.softcap = softcap
        ctx.weight, ctx.chunk_rows = head.weight if isinstance(head, Fp8Head) else head, chunk_rows
        return losses, predictions, *candidates

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None, None, None, None]:
        of_losses, _, _, of_candidates = gradients
        gradient, tokens, logits = ctx.saved_tensors
        assert of_losses is not None, "the base loss is always part of the loss"
        total = torch.mul(gradient, of_losses[:, None], out=torch.empty_like(gradient))  # the product is rounded once
        if of_candidates is not None:
            of_candidates = of_candidates * (1.0 - (logits / ctx.softcap).square()) if ctx.softcap else of_candidates
            for first in range(0, len(total), ctx.chunk_rows):
                rows = slice(first, first + ctx.chunk_rows)
                add_head_rows(total[rows], of_candidates[rows], tokens[rows], ctx.weight)
        return total, None, None, None, None, None


@fused
def add_head_rows(total: Tensor, factors: Tensor, tokens: Tensor, weight: Tensor) -> None:
    """Add to total [R, H], in place, the rows of the head [V, H] of tokens [R, K], times float32 factors [R, K]."""
    added = torch.zeros_like(total, dtype=torch.float32)
    for column in range(tokens.shape[1]):
        added = added + factors[:, column, None] * F.embedding(tokens[:, column], weight)
    total.add_(added.to(total.dtype))


def cross_entropy(
    logits: Tensor, labels: Tensor, losses: Tensor, predictions: Tensor, softcap: float = 0.0, *, with_gradient: bool
) -> None:
    """Fill losses and predictions, and the gradient in place (see `cross_entropy_kernel.cross_entropy`, used on a GPU)."""
    if logits.is_cuda:
        from services.drafter.kernels import cross_entropy_kernel  # triton comes with torch for GPUs only

        cross_entropy_kernel.cross_entropy(logits, labels, losses, predictions, softcap, with_gradient=with_gradient)
        return
    exact = soft_cap(logits.float(), softcap)
    log_normaliser = exact.logsumexp(1, keepdim=True)
    torch.sub(log_normaliser[:, 0], exact.gather(1, labels[:, None])[:, 0], out=losses)
    torch.argmax(logits, 1, out=predictions)
    if with_gradient:
        error = (exact - log_normaliser).exp_().scatter_add_(1, labels[:, None], torch.full_like(log_normaliser, -1.0))
        logits.copy_(error.mul_(1.0 - (exact / softcap).square()) if softcap else error)
