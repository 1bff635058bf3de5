"""Cross entropy through the target's frozen head, in chunks of rows: the logits never exist all at once.

Shapes: R labelled rows, H hidden, V vocabulary, B block size.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def decay_weights(block_size: int, gamma: float) -> NDArray[np.float32]:
    """Weight exp(-(k - 1) / gamma) of slot k = 1 .. B - 1 (arXiv 2602.06036): [B - 1]."""
    return np.exp(-np.arange(block_size - 1) / gamma).astype(np.float32)


def frozen_head_loss(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    """Sum of weight * cross entropy, not normalised; softmax in float32, differentiable in `hidden` only.

    The gradient of the hidden rows is made together with the loss, chunk by chunk, so the backward pass needs no logits.

    Args:
        hidden: [R, H], after the draft model's final norm; R may be 0.
        head_weight: [V, H], frozen; its type is that of both matrix products.
        labels: int64 [R].
        weights: float32 [R].
        chunk_rows: rows whose logits exist at a time.

    Returns:
        The sum, a float32 scalar, and bool [R]: whether the greedy prediction is the label.
    """
    loss, correct = FrozenHeadCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, labels, weights, chunk_rows
    )
    return loss, correct


class FrozenHeadCrossEntropy(torch.autograd.Function):
    """See `frozen_head_loss`."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head_weight: Tensor, labels: Tensor, weights: Tensor, chunk_rows: int
    ) -> tuple[Tensor, Tensor]:
        """Loss and gradient of one chunk of rows after the other."""
        loss = torch.zeros((), dtype=torch.float32, device=hidden.device)
        correct = torch.empty_like(labels, dtype=torch.bool)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for first in range(0, hidden.shape[0], chunk_rows):
            rows = slice(first, first + chunk_rows)
            label, weight = labels[rows, None], weights[rows, None]
            logits = (hidden[rows].to(head_weight.dtype) @ head_weight.T).float()
            correct[rows] = logits.argmax(1) == labels[rows]
            log_normaliser = logits.logsumexp(1, keepdim=True)
            loss += (weight * (log_normaliser - logits.gather(1, label))).sum()
            if gradient is not None:
                error = logits.sub_(log_normaliser).exp_()
                error.scatter_add_(1, label, torch.full_like(weight, -1.0)).mul_(weight)
                gradient[rows] = error.to(head_weight.dtype) @ head_weight
        ctx.mark_non_differentiable(correct)
        ctx.save_for_backward(gradient)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        """The stored gradient times that of the loss."""
        (gradient,) = ctx.saved_tensors
        return gradient * gradients[0].to(gradient.dtype), None, None, None, None
