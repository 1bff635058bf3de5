"""The attention kernels against dense attention, in triton's interpreter if there is no GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.drafter.model.attention import DenseAttention
from services.drafter.model.visibility import LayerMask, key_runs
from tests.builders.batches import random_anchors


def some_rows(num_blocks: int, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return nine of ten rows that may have a label, then the last of them repeated."""
    rows = np.arange(num_blocks * block_size).reshape(num_blocks, block_size)[:-2, 1:].ravel()
    return np.pad(rows[np.arange(len(rows)) % 10 > 0], (0, 20), mode="edge")


def heads(num_rows: int, num_heads: int, random: torch.Generator, head_dim: int = 16) -> Tensor:
    """Return [heads, rows, D] in the memory order of projections."""
    return torch.randn(num_rows, num_heads, head_dim, generator=random).transpose(0, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels are for bfloat16: see the last test")
@pytest.mark.filterwarnings("ignore")  # the interpreter computes with what lies behind the last row
@pytest.mark.parametrize("window", [0, 60])
@pytest.mark.parametrize("lengths", [[330], [130, 40, 200, 31], [7]])
@pytest.mark.parametrize("some", [False, True])
def test_kernels_equal_dense_attention_in_value_and_gradient(lengths: list[int], window: int, some: bool) -> None:
    pytest.importorskip("triton")
    from services.drafter.kernels.swept_attention import SweptAttention

    device = torch.device("cpu")
    num_context, num_blocks, block_size = sum(lengths), min(sum(lengths), 40), 8
    rows = some_rows(num_blocks, block_size) if some else np.arange(num_blocks * block_size)
    runs = key_runs(random_anchors(lengths, num_blocks), block_size, LayerMask(window, causal=window > 0), rows)
    random, num_rows = torch.Generator().manual_seed(0), num_blocks * block_size
    sizes = [(len(rows), 4), (num_context, 2), (num_context, 2), (num_rows, 2), (num_rows, 2)]
    tensors = [heads(*size, random) for size in sizes]
    dense = DenseAttention(runs, num_context, num_rows, device)
    swept = SweptAttention(runs, num_context, num_rows, device)
    results = []
    for attend in (dense, swept):
        inputs = [tensor.detach().requires_grad_() for tensor in tensors]
        output = attend(inputs[0], (inputs[1], inputs[2]), (inputs[3], inputs[4]))
        results.append([output, *torch.autograd.grad(output.square().sum(), inputs)])
    for exact, found in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window", [0, 600])
@pytest.mark.parametrize("some", [False, True])
def test_a_gpu_in_bfloat16_is_close_to_dense_attention_in_float32(window: int, some: bool, head_dim: int) -> None:
    from services.drafter.kernels.swept_attention import SweptAttention

    device, block_size, num_blocks, lengths = torch.device("cuda"), 16, 160, [700, 50, 1300]
    rows = some_rows(num_blocks, block_size) if some else np.arange(num_blocks * block_size)
    runs = key_runs(random_anchors(lengths, num_blocks), block_size, LayerMask(window, causal=window > 0), rows)
    num_context, num_rows, random = sum(lengths), num_blocks * block_size, torch.Generator().manual_seed(0)
    sizes = [(len(rows), 8), (num_context, 2), (num_context, 2), (num_rows, 2), (num_rows, 2)]
    tensors = [heads(*size, random, head_dim).to(device, torch.bfloat16) for size in sizes]
    results = []
    for attend, dtype in (
        (DenseAttention(runs, num_context, num_rows, device), torch.float32),
        (SweptAttention(runs, num_context, num_rows, device), torch.bfloat16),
    ):
        inputs = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        output = attend(inputs[0], (inputs[1], inputs[2]), (inputs[3], inputs[4]))
        results.append([output.float(), *(part.float() for part in torch.autograd.grad(output.sin().sum(), inputs))])
    for exact, found in zip(*results, strict=True):
        assert (found - exact).norm() / exact.norm() < 0.02
