"""The chunked frozen-head loss against a dense one in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from services.drafter.loss import decay_weights, frozen_head_loss

GENERATOR_SEED = 5


def problem(num_rows: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    hidden = torch.randn(num_rows, 16, generator=generator)
    head = torch.randn(40, 16, generator=generator)
    labels = torch.randint(0, 40, (num_rows,), generator=generator)
    weights = torch.rand(num_rows, generator=generator)
    return hidden, head, labels, weights


@pytest.mark.parametrize("chunk_rows", [1, 3, 4, 100])
def test_value_and_gradient_equal_the_dense_loss(chunk_rows: int) -> None:
    hidden, head, labels, weights = problem(11)
    exact = hidden.double().requires_grad_()
    reference = (F.cross_entropy(exact @ head.double().T, labels, reduction="none") * weights.double()).sum()
    (reference * 3).backward()  # type: ignore[no-untyped-call]

    hidden.requires_grad_()
    loss, correct = frozen_head_loss(hidden, head, labels, weights, chunk_rows)
    (loss * 3).backward()  # type: ignore[no-untyped-call]
    assert exact.grad is not None
    torch.testing.assert_close(loss.double(), reference, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad, exact.grad.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(correct, (hidden @ head.T).argmax(1) == labels)


def test_bfloat16_stays_near_the_dense_loss() -> None:
    hidden, head, labels, weights = problem(11)
    reference = (F.cross_entropy(hidden @ head.T, labels, reduction="none") * weights).sum()
    low = hidden.bfloat16().requires_grad_()
    loss, _ = frozen_head_loss(low, head.bfloat16(), labels, weights, 4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.dtype == torch.float32
    assert low.grad is not None
    assert low.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(reference.item(), rel=0.02)


def test_no_rows_give_no_loss() -> None:
    hidden, head, labels, weights = problem(0)
    hidden.requires_grad_()
    loss, _ = frozen_head_loss(hidden, head, labels, weights, 4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == 0
    assert hidden.grad is not None


def test_evaluation_without_gradients() -> None:
    hidden, head, labels, weights = problem(11)
    with torch.no_grad():
        loss, _ = frozen_head_loss(hidden, head, labels, weights, 4)
    assert loss.item() == pytest.approx((F.cross_entropy(hidden @ head.T, labels, reduction="none") * weights).sum().item())


def test_decay() -> None:
    np.testing.assert_allclose(decay_weights(4, 2.0), [1.0, np.exp(-0.5), np.exp(-1.0)], rtol=1e-6)
