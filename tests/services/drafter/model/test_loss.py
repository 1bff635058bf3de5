"""The chunked frozen-head loss against a dense one in float64, and the weights of its rows."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from services.drafter.kernels import cross_entropy_kernel
from services.drafter.model.loss import DPACE_SMOOTHING, cross_entropy, decay_weights, dpace_weights, frozen_head_loss
from services.drafter.model.selector import soft_cap

GENERATOR_SEED = 5


def problem(num_rows: int, hidden_size: int = 16, vocab_size: int = 40) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(GENERATOR_SEED)
    hidden = torch.randn(num_rows, hidden_size, generator=generator)
    head = torch.randn(vocab_size, hidden_size, generator=generator)
    labels = torch.randint(0, vocab_size, (num_rows,), generator=generator)
    weights = torch.rand(num_rows, generator=generator)
    return hidden, head, labels, weights


@pytest.mark.parametrize("chunk_rows", [1, 3, 4, 100])
def test_value_and_gradient_equal_the_dense_loss(chunk_rows: int) -> None:
    hidden, head, labels, weights = problem(11)
    exact = hidden.double().requires_grad_()
    reference = F.cross_entropy(exact @ head.double().T, labels, reduction="none")
    (reference * weights.double()).sum().backward()  # type: ignore[no-untyped-call]

    hidden.requires_grad_()
    losses, predictions, _ = frozen_head_loss(hidden, head, labels, chunk_rows)
    (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
    assert exact.grad is not None
    torch.testing.assert_close(losses.double(), reference, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hidden.grad, exact.grad.float(), rtol=1e-5, atol=1e-5)
    assert torch.equal(predictions, (hidden @ head.T).argmax(1))


def test_bfloat16_stays_near_the_dense_loss() -> None:
    hidden, head, labels, weights = problem(11)
    reference = (F.cross_entropy(hidden @ head.T, labels, reduction="none") * weights).sum()
    low = hidden.bfloat16().requires_grad_()
    losses, *_ = frozen_head_loss(low, head.bfloat16(), labels, 4)
    loss = (losses * weights).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert losses.dtype == torch.float32
    assert low.grad is not None
    assert low.grad.dtype == torch.bfloat16
    assert loss.item() == pytest.approx(reference.item(), rel=0.02)


def test_no_rows_give_no_loss() -> None:
    hidden, head, labels, _ = problem(0)
    hidden.requires_grad_()
    losses, *_ = frozen_head_loss(hidden, head, labels, 4)
    losses.sum().backward()  # type: ignore[no-untyped-call]
    assert losses.shape == (0,)
    assert hidden.grad is not None


def test_evaluation_without_gradients() -> None:
    hidden, head, labels, _ = problem(11)
    with torch.no_grad():
        losses, *_ = frozen_head_loss(hidden, head, labels, 4)
    torch.testing.assert_close(losses, F.cross_entropy(hidden @ head.T, labels, reduction="none"))


def test_decay() -> None:
    np.testing.assert_allclose(decay_weights(4, 2.0), [1.0, np.exp(-0.5), np.exp(-1.0)], rtol=1e-6)


def test_dpace_weights_are_the_gradient_of_the_expected_acceptance() -> None:
    """The weight of a slot is d E / d log q of it, where E is the sum over j of the product of q up to j."""
    random = torch.Generator().manual_seed(1)
    losses = torch.rand(6, 5, generator=random).double() * 3
    label_mask = torch.arange(5)[None] < torch.tensor([5, 3, 1, 0, 5, 2])[:, None]
    label_mask[4, 2] = False  # a gap, as without contiguous_prefix
    log_smoothed = ((1 - DPACE_SMOOTHING) * torch.exp(-losses) + DPACE_SMOOTHING).log().requires_grad_()
    expected: list[Tensor] = []
    for block in range(6):
        product = torch.ones((), dtype=torch.float64)
        for slot in range(5):
            if label_mask[block, slot]:
                product = product * log_smoothed[block, slot].exp()
                expected.append(product)
    torch.stack(expected).sum().backward()  # type: ignore[no-untyped-call]
    weights = dpace_weights(losses, label_mask)
    torch.testing.assert_close(weights, log_smoothed.grad)
    assert not weights[~label_mask].any()


@pytest.mark.parametrize("vocab_size", [40, 128, 5000])
@pytest.mark.parametrize("with_gradient", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 4.0])
def test_the_kernel_equals_float64(vocab_size: int, with_gradient: bool, softcap: float) -> None:
    """On a GPU, or in Triton's interpreter."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    hidden, head, labels, _ = problem(6, 16, vocab_size)
    logits = (hidden @ head.T * 3).to(device)
    labels = labels.to(device)
    logits[1, labels[1]] = logits[1].max() + 1  # one is right
    exact = logits.double().requires_grad_()
    reference = F.cross_entropy(soft_cap(exact, softcap), labels, reduction="none")
    reference.sum().backward()  # type: ignore[no-untyped-call]
    largest = exact.argmax(1)

    losses, predictions = torch.full((6,), torch.nan, device=device), torch.full((6,), -1, device=device)
    before = logits.clone()
    cross_entropy_kernel.cross_entropy(logits, labels, losses, predictions, softcap, with_gradient=with_gradient)
    torch.testing.assert_close(losses.double(), reference, rtol=1e-5, atol=1e-5)
    assert torch.equal(predictions, largest)
    if with_gradient:
        assert exact.grad is not None
        torch.testing.assert_close(logits.double(), exact.grad, rtol=1e-5, atol=1e-6)
    else:
        assert torch.equal(logits, before)


@pytest.mark.gpu
def test_kernel_and_torch_agree_on_bfloat16_logits() -> None:
    hidden, head, labels, _ = problem(64, 256, 50_000)
    logits = (hidden @ head.T / 4).bfloat16()
    results = []
    for device in ("cpu", "cuda"):
        own, losses, predictions = logits.to(device, copy=True), torch.empty(64, device=device), labels.to(device, copy=True)
        cross_entropy(own, labels.to(device), losses, predictions, with_gradient=True)
        results.append((losses.cpu(), own.float().cpu()))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-2, atol=1e-6)
