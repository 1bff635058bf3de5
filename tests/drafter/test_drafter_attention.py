"""The visibility of section 2 of the algorithm, against a definition written as loops; dense and tiled attention."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from services.drafter.attention import Attend, DenseAttention, KeysValues, TiledAttention
from services.drafter.visibility import BlockPlaces, KeyRuns, find_tiles, in_one_sequence, key_runs

CONTEXT_DOCUMENTS = [0] * 7 + [1] * 5
ANCHORS, DOCUMENTS, VALID = [3, 6, 10, 0], [0, 0, 1, 0], [True, True, True, False]
CPU = torch.device("cpu")


def expected(block_size: int, window: int) -> list[list[bool]]:
    rows = []
    for anchor, document, valid in zip(ANCHORS, DOCUMENTS, VALID, strict=True):
        for offset in range(block_size):
            oldest = anchor + offset - (window - 1) if window else 0
            row = [valid and CONTEXT_DOCUMENTS[t] == document and oldest <= t < anchor for t in range(len(CONTEXT_DOCUMENTS))]
            for other in range(len(ANCHORS)):
                own = ANCHORS[other] == anchor and DOCUMENTS[other] == document
                for key in range(block_size):
                    seen = not window or (key <= offset and anchor + key >= oldest)
                    row.append(own and seen)
            rows.append(row)
    return rows


def dense_mask(places: BlockPlaces, block_size: int, window: int, num_context: int) -> Tensor:
    num_rows = len(places.anchors) * block_size
    return DenseAttention(key_runs(places, block_size, window, np.arange(num_rows)), num_context, num_rows, CPU).mask


@pytest.mark.parametrize("window", [0, 1, 2, 4, 100])
def test_visibility_equals_the_definition(window: int) -> None:
    places = BlockPlaces(np.array(ANCHORS), np.array([0, 0, 7, 0]), np.array(VALID))
    mask = dense_mask(places, 3, window, len(CONTEXT_DOCUMENTS))
    assert mask.tolist() == expected(3, window)
    assert mask.any(dim=1).all()  # a row that sees nothing would be NaN


def test_a_block_may_continue_the_context() -> None:
    assert dense_mask(BlockPlaces(np.array([4]), np.array([0]), np.array([True])), 2, 0, 4).all()


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_attention_equals_the_formula(num_groups: int) -> None:
    random = torch.Generator().manual_seed(0)
    query, context, own = heads(4, 5, random), both(num_groups, 6, random), both(num_groups, 5, random)
    runs = KeyRuns(np.array([0, 1, 2, 3, 6]), np.array([2, 2, 6, 4, 6]), np.arange(5), np.arange(5) + 1)
    attend = DenseAttention(runs, 6, 5, CPU)
    keys, values = (torch.cat(pair, 1).repeat_interleave(4 // num_groups, dim=0) for pair in zip(context, own, strict=True))
    scores = (query @ keys.transpose(1, 2) / 8**0.5).masked_fill(~attend.mask, float("-inf"))
    reference = (scores.softmax(-1) @ values).transpose(0, 1).reshape(5, 32)
    torch.testing.assert_close(attend(query, context, own), reference)


def heads(num_heads: int, num_rows: int, random: torch.Generator, head_dim: int = 8) -> Tensor:
    return torch.randn(num_heads, num_rows, head_dim, generator=random)


def both(num_heads: int, num_rows: int, random: torch.Generator, head_dim: int = 8) -> KeysValues:
    return heads(num_heads, num_rows, random, head_dim), heads(num_heads, num_rows, random, head_dim)


def made_up_places(lengths: list[int], num_blocks: int, seed: int = 0) -> BlockPlaces:
    """Sorted anchors over documents of these lengths; the last two blocks are padding."""
    starts = np.cumsum([0, *lengths])
    anchors = np.sort(np.random.default_rng(seed).choice(starts[-1], num_blocks, replace=False))
    valid = np.arange(num_blocks) < num_blocks - 2
    return BlockPlaces(np.where(valid, anchors, 0), starts[np.searchsorted(starts, anchors, side="right") - 1] * valid, valid)


@pytest.mark.parametrize("window", [0, 1, 3, 40, 200])
@pytest.mark.parametrize(("lengths", "block_size"), [([700], 4), ([100, 300, 50, 1], 4), ([130, 260], 16), ([300], 128)])
def test_tiles_equal_the_dense_mask(lengths: list[int], block_size: int, window: int) -> None:
    capacity, num_blocks = 768, 256 // block_size * 2
    places = made_up_places(lengths, num_blocks)
    num_rows = num_blocks * block_size
    runs = in_one_sequence(key_runs(places, block_size, window, np.arange(num_rows)), capacity)
    mask = dense_mask(places, block_size, window, capacity)
    tiles = mask.view(num_rows // 128, 128, -1, 128).sum((1, 3)).numpy()
    partly, wholly = find_tiles(runs, capacity + num_rows)
    assert np.array_equal(wholly, tiles == 128 * 128)
    assert np.array_equal(partly, (tiles > 0) & (tiles < 128 * 128))
    if window in (0, 200):
        assert partly.any()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("wanted", [slice(None), slice(1, 100), slice(3, None, 2)])
def test_tiled_equals_dense_attention(window: int, wanted: slice) -> None:
    check_tiled(make_pair(window, wanted, CPU), atol=1e-5)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
@pytest.mark.parametrize("window", [0, 40])
def test_tiled_equals_dense_attention_in_value_and_gradient_on_a_gpu(window: int) -> None:
    check_tiled(make_pair(window, slice(1, None, 2), torch.device("cuda"), head_dim=64), atol=1e-2, gradients=True)


def make_pair(window: int, wanted: slice, device: torch.device, head_dim: int = 8) -> tuple[list[Attend], list[Tensor]]:
    places, block_size, num_context, num_rows = made_up_places([100, 150], 70), 4, 250, 280
    rows, random = np.arange(num_rows)[wanted], torch.Generator().manual_seed(0)
    runs = key_runs(places, block_size, window, rows)
    tensors = [
        heads(4, len(rows), random, head_dim),
        *both(2, num_context, random, head_dim),
        *both(2, num_rows, random, head_dim),
    ]
    attends: list[Attend] = [
        DenseAttention(runs, num_context, num_rows, device),
        TiledAttention(runs, 300, num_rows, device),
    ]
    return attends, [tensor.to(device) for tensor in tensors]


def check_tiled(pair: tuple[list[Attend], list[Tensor]], atol: float, gradients: bool = False) -> None:
    results = []
    for attend in pair[0]:
        tensors: list[Any] = [tensor.clone().requires_grad_(gradients) for tensor in pair[1]]
        output: Any = attend(tensors[0], (tensors[1], tensors[2]), (tensors[3], tensors[4]))
        if gradients:
            output.square().sum().backward()
        results.append([output.detach(), *(tensor.grad for tensor in tensors if gradients)])
    for dense, tiled in zip(*results, strict=True):
        torch.testing.assert_close(tiled, dense, rtol=1e-2 if gradients else 1e-5, atol=atol)


def test_the_mask_of_flex_attention_is_the_dense_mask() -> None:
    places, num_rows = made_up_places([100, 150], 64), 256
    runs = key_runs(places, 4, 40, np.arange(num_rows))
    tiled = TiledAttention(runs, 256, num_rows, CPU).block_mask
    found = create_mask(tiled.mask_mod, None, None, num_rows, 256 + num_rows, device="cpu")
    assert torch.equal(found[0, 0], dense_mask(places, 4, 40, 256))


@pytest.mark.parametrize("window", [0, 40, 200])
def test_the_tiles_are_listed_as_torch_lists_them(window: int) -> None:
    places, num_rows = made_up_places([300, 400], 256), 1024
    tiled: Any = TiledAttention(key_runs(places, 4, window, np.arange(num_rows)), 768, num_rows, CPU).block_mask
    own: Any = create_block_mask(tiled.mask_mod, None, None, num_rows, 768 + num_rows, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, listed = (getattr(own, f"{kind}_{part}") for part in ("num_blocks", "indices"))
        assert torch.equal(getattr(tiled, f"{kind}_num_blocks"), counts)
        indices = getattr(tiled, f"{kind}_indices")
        assert indices.shape == listed.shape
        for place in np.ndindex(*counts.shape):
            assert torch.equal(indices[place][: counts[place]], listed[place][: counts[place]])
    assert window or tiled.full_kv_num_blocks.any()
