"""The convolution equals its formula, stays within a block, and begins as the identity."""

import pytest
import torch

from services.drafter.model.convolution import DynamicConvolution, convolve, mix, mix_backward

HIDDEN, GROUP = 6, 2


def problem(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows [R, H], kernels [R, 2 * 2 * G] and the base [2, 2, H]."""
    random = torch.Generator().manual_seed(0)
    sizes = (num_rows, HIDDEN), (num_rows, 2 * 2 * HIDDEN // GROUP), (2, 2, HIDDEN)
    rows, kernels, base = (torch.randn(size, generator=random) for size in sizes)
    return rows, kernels, base


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("block_size", [2, 3])
def test_every_channel_equals_the_formula(side: int, block_size: int) -> None:
    rows, kernels, base = problem(6)
    is_first = (torch.arange(6) % block_size == 0)[:, None]
    found = convolve(rows, kernels, base, side, is_first)
    num_groups = HIDDEN // GROUP
    for row in range(6):
        for channel in range(HIDDEN):
            at = [(side * 2 + tap) * num_groups + channel // GROUP for tap in (0, 1)]  # laid out side, tap, group
            own, previous = (base[side, tap, channel] + kernels[row, at[tap]] for tap in (0, 1))
            before = rows[row - 1, channel] if row % block_size else torch.tensor(0.0)
            expected = own * rows[row, channel] + previous * before
            assert found[row, channel].item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)


def test_a_change_reaches_the_row_and_the_next_one_of_its_block() -> None:
    rows, kernels, base = problem(8)
    is_first = (torch.arange(8) % 4 == 0)[:, None]
    plain = convolve(rows, kernels, base, 0, is_first)
    for changed, reached in ((1, [1, 2]), (3, [3]), (4, [4, 5])):
        other = rows.clone()
        other[changed] += 1.0
        differs = (convolve(other, kernels, base, 0, is_first) != plain).any(1)
        assert differs.nonzero()[:, 0].tolist() == reached


def test_it_begins_as_the_identity() -> None:
    rows, *_ = problem(4)
    convolution = DynamicConvolution(HIDDEN, GROUP)
    convolution.initialise()
    base, projection = convolution.weights()
    assert projection.shape == (2 * 2 * HIDDEN // GROUP, HIDDEN)
    is_first = torch.tensor([[True], [False], [False], [True]])
    for side in (0, 1):
        assert torch.equal(convolve(rows, rows @ projection.T, base, side, is_first), rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the whole step is compared with the CPU's: test_step.py")
@pytest.mark.parametrize(
    ("num_rows", "hidden", "group_size", "block_size"), [(70, 6, 2, 5), (33, 36, 12, 3), (64, 576, 16, 16), (1, 32, 16, 4)]
)
def test_the_kernel_of_the_backward_pass_equals_autograd(num_rows: int, hidden: int, group_size: int, block_size: int) -> None:
    pytest.importorskip("triton")
    random = torch.Generator().manual_seed(0)
    sizes = (num_rows, hidden), (num_rows, 2, 2, hidden // group_size), (2, hidden), (num_rows, hidden)
    rows, kernels, base, gradient = (torch.randn(size, generator=random) for size in sizes)
    is_first = (torch.arange(num_rows) % block_size == 0)[:, None]
    inputs = [tensor.requires_grad_() for tensor in (rows, kernels[:, 1], base)]
    expected = torch.autograd.grad(mix(inputs[0], inputs[1], inputs[2], is_first), inputs, gradient)
    found = mix_backward(gradient, *(tensor.detach() for tensor in inputs), is_first)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
