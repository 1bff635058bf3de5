"""Rounds against cases counted by hand, those of DFlash 2 against plain loops, and the control with other features."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from common.config import Config
from services.drafter.model.acceptance import (
    count_rounds,
    evaluate_batch,
    matching_prefix,
    stop_best,
    summarise,
    with_features_of_another_document,
)
from services.drafter.model.anchors import all_blocks
from services.drafter.model.batch import PackedBatch
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_hidden
from tests.builders.batches import (
    BLOCK_SIZE,
    MASK_TOKEN,
    dflash2,
    document_alone,
    frozen_weights,
    make_batch,
    make_config,
    randomise,
)

LENGTHS = [20, 9, 14, 30, 4]


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


def fewest_rounds(accepted: list[int], anchor: int, end: int) -> int:
    """The fewest rounds from an anchor to the end of its span, over all ways to stop earlier."""
    if anchor >= end - 1:
        return 0
    return 1 + min(fewest_rounds(accepted, anchor + count + 1, end) for count in range(accepted[anchor] + 1))


def test_stopping_where_the_next_round_ends_last_takes_the_fewest_rounds() -> None:
    accepted, stopped = [2, 3, 0, 0, 0, 0], [0, 3, 0, 0, 0, 0]
    assert stop_best(np.array(accepted), 4).tolist() == stopped
    assert count(accepted, [1] * 6, [0, 6]) == (3, 5)  # 0 -> 3 -> 4 -> 5
    assert count(stopped, [1] * 6, [0, 6]) == (2, 5)  # 0 -> 1 -> 5
    random, num_better = np.random.default_rng(0), 0
    for _ in range(200):
        drawn = np.minimum(random.integers(0, 4, 12), np.arange(12)[::-1])
        assert (stop_best(drawn, 4) <= drawn).all()
        rows = drawn, stop_best(drawn, 4)
        longest, best = (count_rounds(row, np.ones(12, np.bool_), np.array([0, 12]), 4).sum() for row in rows)
        assert best == fewest_rounds(drawn.tolist(), 0, 12)
        num_better += int(best < longest)
    assert num_better > 10  # or accepting everything would do as well


def count_by_hand(model: DraftModel, batch: PackedBatch, config: Config) -> tuple[NDArray[np.int64], int]:
    """Return rounds of the likeliest tokens and recall [3, B], and the fewest rounds: plain loops over one document."""
    (blocks,), (embed, head) = all_blocks(batch, config), frozen_weights()
    hidden = block_hidden(model, embed, batch, blocks, config).detach().view(len(blocks.anchors), BLOCK_SIZE, -1)
    end, rounds = len(batch.input_ids), np.zeros((3, BLOCK_SIZE), dtype=np.int64)
    unary, oracle = [0] * end, [0] * end
    for block in np.flatnonzero(blocks.valid):
        anchor, is_likeliest, is_candidate = int(blocks.anchors[block]), True, True
        for slot in range(1, min(BLOCK_SIZE, end - anchor)):
            order = (head @ hidden[block, slot]).argsort(descending=True).tolist()
            rank = order.index(int(batch.input_ids[anchor + slot]))
            is_likeliest, is_candidate = is_likeliest and rank == 0, is_candidate and rank < config.draft.selector_top_k
            unary[anchor] += is_likeliest
            oracle[anchor] += is_candidate
            rounds[1, slot] += rank < config.draft.selector_top_k
            rounds[2, slot] += 1
    anchor = first = int(batch.loss_mask.argmax())
    while anchor < end - 1:
        emitted = min(unary[anchor] + 1, end - 1 - anchor)
        rounds[0, emitted - 1] += 1
        anchor += emitted
    return rounds, fewest_rounds(oracle, first, end)


def test_unary_oracle_and_recall_equal_plain_loops() -> None:
    config = dflash2(make_config(anchors_per_batch=64), selector_top_k=10)
    model, batch, weights = randomise(DraftModel(config)), make_batch(LENGTHS), frozen_weights()
    chosen, of_selector = evaluate_batch(model, *weights, batch, config)
    parts = [count_by_hand(model, document_alone(batch, document), config) for document in range(len(LENGTHS))]
    assert of_selector[[0, 2, 3]].tolist() == np.sum([part[0] for part in parts], axis=0).tolist()
    assert of_selector[1].sum() == sum(part[1] for part in parts)
    recalled, labels = of_selector[2:]
    assert 0 < recalled.sum() < labels.sum()
    assert labels.tolist() == [0, *(sum(max(length - 2 - slot, 0) for length in LENGTHS) for slot in (1, 2, 3))]
    assert of_selector[1].sum() < min(of_selector[0].sum(), chosen.sum())  # in fewer rounds


@pytest.mark.parametrize("seed", range(4))
def test_no_choice_among_the_candidates_beats_the_oracle(seed: int) -> None:
    config = dflash2(make_config(anchors_per_batch=64), selector_top_k=10)
    batch, (embed, head) = make_batch(LENGTHS, seed=seed), frozen_weights(seed)
    counted = evaluate_batch(randomise(DraftModel(config)), embed, head, batch, config)
    chosen, unary, oracle = (summarise(row) for row in (counted.chosen.sum(0), *counted.of_selector[:2]))
    assert chosen.num_tokens == unary.num_tokens == oracle.num_tokens == sum(length - 3 for length in LENGTHS)
    assert oracle.acceptance > max(chosen.acceptance, unary.acceptance)


def test_a_fresh_selector_accepts_what_the_likeliest_tokens_do() -> None:
    config = dflash2(make_config(anchors_per_batch=64))
    model = randomise(DraftModel(config))
    assert model.candidate_selector is not None
    model.candidate_selector.initialise()
    counted = evaluate_batch(model, *frozen_weights(), make_batch(LENGTHS), config)
    assert counted.of_selector[0].tolist() == counted.chosen.sum(0).tolist()


def test_what_the_selector_adds_does_not_depend_on_the_batch() -> None:
    config = dflash2(make_config(anchors_per_batch=64), selector_top_k=12)
    model, batch, weights = randomise(DraftModel(config)), make_batch(LENGTHS), frozen_weights()
    whole = evaluate_batch(model, *weights, batch, config)
    parts = [evaluate_batch(model, *weights, document_alone(batch, index), config) for index in range(len(LENGTHS))]
    assert np.array_equal(whole.chosen, np.concatenate([part.chosen for part in parts]))
    assert np.array_equal(whole.of_selector, np.sum([part.of_selector for part in parts], axis=0))
