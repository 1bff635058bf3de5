"""The visibility of section 2 of the algorithm, against a definition written as loops; dense attention."""

import numpy as np
import pytest
import torch
from torch import Tensor

from services.drafter.kernels.key_runs import KeyRuns
from services.drafter.model.attention import DenseAttention, KeysValues
from services.drafter.model.visibility import BlockAnchors, LayerMask, key_runs

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


def dense_mask(blocks: BlockAnchors, block_size: int, window: int, num_context: int) -> Tensor:
    num_rows = len(blocks.anchors) * block_size
    return DenseAttention(
        key_runs(blocks, block_size, LayerMask(window, causal=window > 0), np.arange(num_rows)), num_context, num_rows, CPU
    ).mask


@pytest.mark.parametrize("window", [0, 1, 2, 4, 100])
def test_visibility_equals_the_definition(window: int) -> None:
    blocks = BlockAnchors(np.array(ANCHORS), np.array([0, 0, 7, 0]), np.array(VALID))
    mask = dense_mask(blocks, 3, window, len(CONTEXT_DOCUMENTS))
    assert mask.tolist() == expected(3, window)
    assert mask.any(dim=1).all()  # a row that sees nothing would be NaN


def test_a_block_may_continue_the_context() -> None:
    assert dense_mask(BlockAnchors(np.array([4]), np.array([0]), np.array([True])), 2, 0, 4).all()


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
