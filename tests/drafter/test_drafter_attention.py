"""The visibility of section 2 of the algorithm, against a definition written as loops."""

import pytest
import torch

from services.drafter.attention import attend, visibility_mask

CONTEXT_DOCUMENTS = [0] * 7 + [1] * 5
ANCHORS, DOCUMENTS, VALID = [3, 6, 10, 0], [0, 0, 1, 0], [True, True, True, False]


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


@pytest.mark.parametrize("window", [0, 1, 2, 4, 100])
def test_visibility_equals_the_definition(window: int) -> None:
    mask = visibility_mask(
        torch.tensor(ANCHORS), torch.tensor(DOCUMENTS), torch.tensor(CONTEXT_DOCUMENTS), torch.tensor(VALID), 3, window
    )
    assert mask.tolist() == expected(3, window)
    assert mask.any(dim=1).all()  # a row that sees nothing would be NaN


def test_a_block_may_continue_the_context() -> None:
    mask = visibility_mask(torch.tensor([4]), torch.tensor([0]), torch.zeros(4).long(), torch.tensor([True]), 2, 0)
    assert mask.all()


@pytest.mark.parametrize("num_groups", [1, 2, 4])
def test_attention_equals_the_formula(num_groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(4, 5, 8, generator=generator)
    key, value = torch.randn(2, num_groups, 9, 8, generator=generator)
    mask = torch.rand(5, 9, generator=generator) < 0.5
    mask[:, 0] = True
    keys, values = (rows.repeat_interleave(4 // num_groups, dim=0) for rows in (key, value))
    scores = (query @ keys.transpose(1, 2) / 8**0.5).masked_fill(~mask, float("-inf"))
    reference = (scores.softmax(-1) @ values).transpose(0, 1).reshape(5, 32)
    torch.testing.assert_close(attend(query, key, value, mask), reference)
