"""Rounds against cases counted by hand, and the control with features of another document."""

import numpy as np
import pytest
import torch

from services.drafter.model.acceptance import (
    count_rounds,
    evaluate_batch,
    matching_prefix,
    summarise,
    with_features_of_another_document,
)
from services.drafter.model.anchors import all_blocks
from services.drafter.model.model import DraftModel
from tests.builders.batches import MASK_TOKEN, frozen_weights, make_batch, make_config


def count(accepted: list[int], loss_mask: list[int], cu_seqlens: list[int]) -> tuple[int, int]:
    rounds = count_rounds(np.array(accepted), np.array(loss_mask, dtype=np.bool_), np.array(cu_seqlens), block_size=10)
    total = summarise(rounds.sum(0))
    return total.num_rounds, total.num_tokens


@pytest.mark.parametrize(
    ("accepted", "loss_mask", "cu_seqlens", "expected"),
    [
        ([0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 6], (3, 3)),  # nothing accepted: one token per round
        ([9, 9, 1, 9, 0, 9], [0, 0, 1, 1, 1, 1], [0, 6], (2, 3)),  # 2 -> 4 -> 5, the last token
        ([9, 9, 2, 9, 9, 9], [0, 0, 1, 1, 1, 1], [0, 6], (1, 3)),  # 2 -> 5: two drafts and the target's own token
        ([9, 9, 3, 9, 9, 9], [0, 0, 1, 1, 1, 1], [0, 6], (1, 3)),  # all three drafts; nothing follows the last token
        ([9, 9, 9, 9, 9, 9], [0, 0, 0, 0, 0, 1], [0, 6], (0, 0)),  # the prefill gave the only token
        ([9, 9, 9, 9, 9, 9], [0, 0, 0, 0, 0, 0], [0, 6], (0, 0)),
        ([1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 1, 1], [0, 7], (2, 3)),  # two spans of a conversation: 1 round each
        ([1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1], [0, 3, 7], (4, 5)),  # two documents, no count_rounds across
    ],
)
def test_rounds_counted_by_hand(
    accepted: list[int], loss_mask: list[int], cu_seqlens: list[int], expected: tuple[int, int]
) -> None:
    assert count(accepted, loss_mask, cu_seqlens) == expected


def test_rounds_are_counted_by_document_and_length() -> None:
    accepted, cu_seqlens = np.array([9, 2, 9, 9, 0, 0, 9, 1, 9]), np.array([0, 6, 9])
    rounds = count_rounds(accepted, np.array([0, 1, 1, 1, 1, 1, 0, 1, 1], dtype=np.bool_), cu_seqlens, block_size=4)
    assert rounds.tolist() == [[1, 0, 1, 0], [1, 0, 0, 0]]  # 1 -> 4 -> 5; the last draft of a span is its last token


def test_acceptance_of_rounds() -> None:
    found = summarise(np.array([5, 0, 3, 2]))
    assert (found.num_rounds, found.num_tokens, found.acceptance) == (10, 22, 2.2)
    assert found.acceptance_per_position == [0.5, 0.5, 0.2]
    assert 1 + sum(found.acceptance_per_position) == pytest.approx(found.acceptance)
    nothing = summarise(np.zeros(4, dtype=np.int64))
    assert (nothing.acceptance, nothing.acceptance_per_position) == (0.0, [0.0, 0.0, 0.0])


def test_only_the_leading_supervised_matches_count() -> None:
    batch = make_batch([8], prompt=2)
    blocks = next(all_blocks(batch, make_config()))
    right = blocks.labels.copy()
    assert matching_prefix(right, blocks)[:6].tolist() == [3, 3, 3, 2, 1, 0]
    wrong_in_slot_2 = right.copy()
    wrong_in_slot_2[:, 1] = MASK_TOKEN
    assert matching_prefix(wrong_in_slot_2, blocks)[:6].tolist() == [1, 1, 1, 1, 1, 0]
    assert not matching_prefix(right, blocks)[5:].any()  # padding


def test_chunks_of_blocks_do_not_change_the_result() -> None:
    batch, weights = make_batch([20, 9, 14]), frozen_weights()
    totals = [
        evaluate_batch(DraftModel(config), *weights, batch, config).chosen
        for config in (make_config(anchors_per_batch=size) for size in (3, 16, 64))
    ]
    assert np.array_equal(totals[0], totals[1])
    assert np.array_equal(totals[0], totals[2])
    assert (totals[0] * np.arange(1, 5)).sum(1).tolist() == [17, 6, 11]


def test_foreign_features_are_the_next_documents_by_position() -> None:
    batch = make_batch([3, 5, 2])
    own, foreign = batch.hidden_states, with_features_of_another_document(batch).hidden_states
    assert torch.equal(foreign[:3], own[3:6])
    assert torch.equal(foreign[3:8], own[[8, 9, 8, 9, 8]])
    assert torch.equal(foreign[8:], own[:2])


def test_foreign_features_of_a_single_document_are_zeros() -> None:
    assert not with_features_of_another_document(make_batch([4])).hidden_states.any()
