"""Blocks drafted behind a growing context are those of training.

Shapes: B block size, K taps, H hidden.
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
from services.drafter.model.attention import DenseAttention
from services.drafter.model.model import DraftModel
from services.drafter.model.visibility import BlockAnchors, LayerMask, key_runs
from tests.builders.targets import make_target

CPU = torch.device("cpu")
FULL, SLIDING = "full_attention", "sliding_attention"
COUNTS = [[300, 3, 1, 2], [1, 1, 4, 2], [12, 4, 1, 300], [45, 2, 1, 4]]  # rows new to a context in each round
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


def taps_of(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 2, 32, generator=torch.Generator().manual_seed(seed))


def attention_of_one(length: int, block_size: int, mask: LayerMask) -> DenseAttention:
    """That of the training, for one block behind one context."""
    anchors = BlockAnchors(np.array([length]), np.array([0]), np.array([True]))
    return DenseAttention(key_runs(anchors, block_size, mask, np.arange(block_size)), length, block_size, CPU)


def alone(draft: DraftModel, config: Config, target: Any, taps: Tensor, anchor: int) -> Tensor:
    """The block [B, H] behind one context, which is projected in one go."""
    length, block_size = len(taps), config.draft.block_size
    context = draft.context_keys_values(draft.project_context(taps), torch.arange(length))
    embedded = target.get_input_embeddings()(torch.tensor([anchor, config.draft.mask_token_id]))
    attends = [attention_of_one(length, block_size, mask) for mask in draft.masks]
    block: Tensor = draft(embedded, torch.arange(length, length + block_size), context, attends)
    return block


@pytest.mark.parametrize(("kinds", "window", "num_groups"), KINDS)
def test_a_growing_context_equals_one_that_is_projected_in_one_go(
    tmp_path: Path, kinds: list[str], window: int, num_groups: int
) -> None:
    config, target, draft = tiny(tmp_path, kinds, window, num_groups)
    for counts in COUNTS:
        drafter, known = BlockDrafter(draft, config.draft, target), taps_of(0)
        for seed, count in enumerate(counts):
            new = taps_of(count, seed)
            known = torch.cat([known, new])
            drafter.append(new)
            expected = alone(draft, config, target, known, 5 + seed)
            torch.testing.assert_close(drafter.hidden(5 + seed), expected, atol=1e-5, rtol=1e-5)


def test_drafting_leaves_no_trace(tmp_path: Path) -> None:
    config, target, draft = tiny(tmp_path, [SLIDING, FULL], 6)
    once, twice = (BlockDrafter(draft, config.draft, target) for _ in range(2))
    for seed, count in enumerate((9, 1)):
        once.append(taps_of(count, seed))
        twice.append(taps_of(count, seed))
        twice.hidden(1)
    assert torch.equal(once.hidden(3), twice.hidden(3))
