"""The attention kernels against dense attention, in triton's interpreter where there is no GPU; the sweeps by counting."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from services.drafter.kernels.key_runs import TILE, sweeps_of_keys, sweeps_of_rows
from services.drafter.model.attention import DenseAttention
from services.drafter.model.visibility import BlockAnchors, key_runs


def made_up_places(lengths: list[int], num_blocks: int) -> BlockAnchors:
    """Sorted anchors over documents of these lengths; the last two blocks are padding."""
    starts = np.cumsum([0, *lengths])
    anchors = np.sort(np.random.default_rng(0).choice(starts[-1], num_blocks, replace=False))
    valid = np.arange(num_blocks) < num_blocks - 2
    return BlockAnchors(np.where(valid, anchors, 0), starts[np.searchsorted(starts, anchors, side="right") - 1] * valid, valid)


def some_rows(num_blocks: int, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Nine of ten rows that may have a label, then the last of them over and over."""
    rows = np.arange(num_blocks * block_size).reshape(num_blocks, block_size)[:-2, 1:].ravel()
    return np.pad(rows[np.arange(len(rows)) % 10 > 0], (0, 20), mode="edge")


def covered(sweeps: Any, num_tiles: int, whole: bool) -> Any:
    """[n, num_tiles]: is a tile within the sweep, or within its whole part."""
    tile = np.arange(num_tiles)
    first, last = (1, 2) if whole else (0, 3)
    return (tile >= sweeps[:, first, None]) & (tile < sweeps[:, last, None])


@pytest.mark.parametrize("window", [0, 1, 150, 400])
@pytest.mark.parametrize("lengths", [[1500], [100, 900, 50, 1, 449]])
def test_sweeps_cover_what_is_seen_and_call_whole_only_what_is(lengths: list[int], window: int) -> None:
    runs = key_runs(made_up_places(lengths, 256), 4, window, np.arange(1024))
    key = np.arange(1536)
    seen_keys = (key >= runs.start[:, None]) & (key < runs.end[:, None])
    counts = seen_keys.reshape(8, TILE, 12, TILE).sum((1, 3))
    visible, wholly = counts > 0, counts == TILE * TILE
    of_rows = sweeps_of_rows(runs.start, runs.end)
    of_keys = sweeps_of_keys(of_rows, 12)
    for sweeps, seen, whole in ((of_rows, visible, wholly), (of_keys, visible.T, wholly.T)):
        assert (np.diff(sweeps, axis=1) >= 0).all()
        assert (covered(sweeps, seen.shape[1], whole=False) >= seen).all()
        assert (covered(sweeps, seen.shape[1], whole=True) <= whole).all()
    if len(lengths) == 1 and window != 1:
        assert np.array_equal(covered(of_rows, 12, whole=True), wholly)  # nothing that is whole is masked
        assert covered(of_rows, 12, whole=False).sum() == visible.sum()


def heads(num_rows: int, num_heads: int, random: torch.Generator, head_dim: int = 16) -> Tensor:
    """[heads, rows, D] in the order in memory that projections leave."""
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
    runs = key_runs(made_up_places(lengths, num_blocks), block_size, window, rows)
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
def test_a_gpu_computes_in_bfloat16_what_dense_attention_does_in_float32(window: int, some: bool, head_dim: int) -> None:
    from services.drafter.kernels.swept_attention import SweptAttention

    device, block_size, num_blocks, lengths = torch.device("cuda"), 16, 160, [700, 50, 1300]
    rows = some_rows(num_blocks, block_size) if some else np.arange(num_blocks * block_size)
    runs = key_runs(made_up_places(lengths, num_blocks), block_size, window, rows)
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
