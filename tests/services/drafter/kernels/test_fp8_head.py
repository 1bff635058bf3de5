"""The head in FP8 against the exact one: effects of rounding, and their limits."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from services.drafter.kernels.fp8_head import Fp8Head, quantise
from services.drafter.model.loss import frozen_head_loss, loss_head

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS, HIDDEN, VOCAB = 48, 64, 4096


def problem(sharpness: float) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden rows that point to their labels, the sharper the more; head; labels."""
    random = torch.Generator().manual_seed(0)
    head, noise = torch.randn(VOCAB, HIDDEN, generator=random), torch.randn(ROWS, HIDDEN, generator=random)
    labels = torch.randint(VOCAB, (ROWS,), generator=random)
    hidden = sharpness * head[labels] / HIDDEN**0.5 + 0.3 * noise
    return hidden.bfloat16().to(DEVICE), head.bfloat16().to(DEVICE), labels.to(DEVICE)


def loss_and_gradient(hidden: Tensor, head: Tensor | Fp8Head, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = hidden.detach().requires_grad_()
    losses, predictions, _ = frozen_head_loss(hidden, head, labels, chunk_rows=20)
    torch.autograd.backward(losses.sum())
    assert hidden.grad is not None
    return losses.detach(), hidden.grad.float(), predictions


def test_a_row_keeps_three_bits_of_every_value_whatever_its_size() -> None:
    rows = torch.randn(5, 300, generator=torch.Generator().manual_seed(0)) * torch.tensor(
        [[1e-20], [1e-3], [1.0], [1e4], [0.0]]
    )
    values, scales = quantise(rows)
    kept = values.float() * scales
    near = rows.abs() > rows.abs().amax(1, keepdim=True) / 1e4
    assert (kept - rows).abs()[near].max() == 0 or ((kept - rows).abs() <= rows.abs() / 16 + scales * 2**-10)[near].all()
    assert torch.equal(kept[4], rows[4])


@pytest.mark.parametrize("kind", ["fp8_logits", "fp8"])
@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
def test_loss_and_gradient_are_near_the_exact_ones(kind: Literal["fp8_logits", "fp8"], sharpness: float) -> None:
    hidden, weight, labels = problem(sharpness)
    exact = loss_and_gradient(hidden, weight, labels)
    found = loss_and_gradient(hidden, loss_head(weight, kind), labels)
    torch.testing.assert_close(found[0].mean(), exact[0].mean(), rtol=0.01, atol=0.01)
    difference = (found[1] - exact[1]).norm() / exact[1].norm()
    assert difference < (0.15 if sharpness == 4.0 else 0.06)  # logits of certain rows: little is left of their gradient
    assert (found[2] == exact[2]).float().mean() > (0.9 if sharpness else 0.5)


@pytest.mark.parametrize("scale", [1e-3, 30.0])
def test_neither_a_flat_nor_a_certain_prediction_loses_its_gradient(scale: float) -> None:
    """Flat: each probability is far below what e4m3 has beside a 1. Certain and wrong: two opposite rows are all there is."""
    _, weight, labels = problem(0.0)
    hidden = (scale * weight[labels.roll(1)].float() / HIDDEN).bfloat16()
    exact = loss_and_gradient(hidden, weight, labels)
    found = loss_and_gradient(hidden, loss_head(weight, "fp8"), labels)
    assert (found[1] - exact[1]).norm() / exact[1].norm() < 0.05


def test_the_exact_head_is_the_weight() -> None:
    weight = torch.randn(16, 16)
    assert loss_head(weight, "exact") is weight
