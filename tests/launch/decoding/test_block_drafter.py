"""Blocks drafted for several rows at once are those of each row alone, and cost no more than its share.

Shapes: R rows, B block size, C columns, K taps, H hidden.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import Config
from launch.decoding.block_drafter import BlockDrafter
from launch.decoding.contexts import Contexts
from launch.decoding.row_attention import RowAttention
from services.drafter.model.attention import DenseAttention
from services.drafter.model.model import DraftModel
from services.drafter.model.visibility import BlockAnchors, key_runs
from tests.builders.targets import make_target

CPU = torch.device("cpu")
FULL, SLIDING = "full_attention", "sliding_attention"
FIRST, LATER = [300, 1, 12, 45], [[3, 1, 4, 2], [1, 4, 1, 1], [2, 2, 300, 4]]  # rows new to each of four contexts
KINDS = [
    pytest.param([FULL, FULL], 6, 2, id="full"),
    pytest.param([SLIDING, SLIDING], 6, 2, id="sliding"),
    pytest.param([SLIDING, FULL], 2, 4, id="window-below-block"),
    pytest.param([SLIDING, FULL], 50, 1, id="window-between-contexts"),
]


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tiny(folder: Path, kinds: list[str], window: int, num_groups: int = 2) -> tuple[Config, Any, DraftModel]:
    draft = f"draft.layer_types={kinds}", f"draft.sliding_window={window}", f"draft.num_key_value_heads={num_groups}"
    config, target = make_target(folder, "qwen3", *draft)
    return config, target, DraftModel(config)


def taps_of(counts: list[int], seed: int = 0) -> list[Tensor]:
    random = torch.Generator().manual_seed(seed)
    return [torch.randn(count, 2, 32, generator=random) for count in counts]


def attention_of_one(length: int, block_size: int, window: int) -> DenseAttention:
    """That of the training, for one block behind one context."""
    places = BlockAnchors(np.array([length]), np.array([0]), np.array([True]))
    return DenseAttention(key_runs(places, block_size, window, np.arange(block_size)), length, block_size, CPU)


def alone(draft: DraftModel, config: Config, target: Any, taps: Tensor, anchor: int) -> Tensor:
    """The block [B, H] behind one context, which is projected in one go."""
    length, block_size = len(taps), config.draft.block_size
    context = draft.context_keys_values(draft.project_context(taps), torch.arange(length))
    embedded = target.get_input_embeddings()(torch.tensor([anchor, config.draft.mask_token_id]))
    attends = [attention_of_one(length, block_size, window) for window in draft.windows]
    block: Tensor = draft(embedded, torch.arange(length, length + block_size), context, attends)
    return block


@pytest.mark.parametrize(("kinds", "window", "num_groups"), KINDS)
def test_rows_together_equal_each_alone(tmp_path: Path, kinds: list[str], window: int, num_groups: int) -> None:
    config, target, draft = tiny(tmp_path, kinds, window, num_groups)
    drafter, known, anchors = BlockDrafter(draft, config.draft, target, 4), taps_of([0] * 4), [5, 6, 7, 8]
    for seed, counts in enumerate([FIRST, *LATER]):
        rows = [0, 1, 2, 3] if seed < 2 else [2, 0]  # later rounds without two of them, the others swapped
        if seed == 2:
            drafter.select(rows)
        new = taps_of(counts, seed)
        known = [torch.cat(both) for both in zip(known, new, strict=True)]
        drafter.append([new[row] for row in rows])
        hidden = drafter.hidden([anchors[row] for row in rows])
        for block, row in zip(hidden, rows, strict=True):
            torch.testing.assert_close(block, alone(draft, config, target, known[row], anchors[row]), atol=1e-5, rtol=1e-5)


def test_drafting_leaves_no_trace(tmp_path: Path) -> None:
    config, target, draft = tiny(tmp_path, [SLIDING, FULL], 6)
    once, twice = (BlockDrafter(draft, config.draft, target, 2) for _ in range(2))
    for seed, counts in enumerate(([9, 2], [1, 3])):
        once.append(taps_of(counts, seed))
        twice.append(taps_of(counts, seed))
        twice.hidden([1, 2])
        twice.select([0, 1])
    assert torch.equal(once.hidden([3, 4]), twice.hidden([3, 4]))


def test_padding_does_not_matter(tmp_path: Path) -> None:
    config, target, draft = tiny(tmp_path, [SLIDING, FULL], 6)
    drafter = BlockDrafter(draft, config.draft, target, 3)
    drafter.append(taps_of([40, 3, 1]))
    hidden = drafter.hidden([1, 2, 3])
    for heads in (heads for pair in drafter._contexts.layers() for heads in pair):
        for row, length in enumerate([40, 3, 1]):
            heads[row, :, length:] = 1e30
    assert torch.equal(drafter.hidden([1, 2, 3]), hidden)


def test_a_row_that_is_not_finite_stays_alone(tmp_path: Path) -> None:
    config, target, draft = tiny(tmp_path, [SLIDING, FULL], 6)
    together, beside = (BlockDrafter(draft, config.draft, target, 3) for _ in range(2))
    for seed, counts in enumerate(([20, 300, 1], [1, 4, 3])):
        taps = taps_of(counts, seed)
        together.append(taps)
        beside.append([taps[0], taps[1] * torch.nan, taps[2]])
        expected, found = together.hidden([1, 2, 3]), beside.hidden([1, 2, 3])
        assert found[1].isnan().all()
        assert torch.equal(found[[0, 2]], expected[[0, 2]])
    together.select([2, 0])
    beside.select([2, 0])
    assert torch.equal(beside.hidden([3, 1]), together.hidden([3, 1]))


@pytest.mark.parametrize("window", [0, 2, 6, 50])
def test_what_a_row_sees_depends_on_nobody(tmp_path: Path, window: int) -> None:
    config, _, draft = tiny(tmp_path, [FULL, FULL], 6)
    contexts, block_size = Contexts(config.draft, 3, draft.fc.weight), config.draft.block_size
    lengths = np.array([17, 0, 60])
    contexts.lengths = lengths
    mask = RowAttention(lengths, contexts.places([block_size] * 3), config.draft, window).mask
    group = config.draft.num_attention_heads // config.draft.num_key_value_heads
    assert mask.shape == (3, 1, group * block_size, 60 + block_size)
    for row, length in enumerate(lengths.tolist()):
        for head in mask[row, 0].view(group, block_size, -1):
            assert torch.equal(head[:, : length + block_size], attention_of_one(length, block_size, window).mask)
            assert not head[:, length + block_size :].any()


def test_memory_grows_with_rows_and_in_steps(tmp_path: Path) -> None:
    config, _, draft = tiny(tmp_path, [SLIDING, FULL], 6)
    for num_rows in (1, 8):
        contexts = Contexts(config.draft, num_rows, draft.fc.weight)
        for count, num_columns, room in ((252, 256, 256), (1, 257, 512), (255, 512, 512), (600, 1112, 1280)):
            places = contexts.places([count] * num_rows)
            contexts.append(places, draft.context_keys_values(torch.zeros(count * num_rows, 32), places.columns))
            tensors = [heads for pair in contexts.layers() for heads in pair]
            assert [heads.shape for heads in tensors] == [(num_rows, 2, num_columns, 8)] * 4
            assert [heads.untyped_storage().nbytes() for heads in tensors] == [num_rows * 2 * room * 8 * 4] * 4
