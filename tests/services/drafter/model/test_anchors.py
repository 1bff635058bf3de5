"""Blocks: the draw, quotas, candidates and labels."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from services.drafter.model.anchors import Blocks, all_blocks, choose_blocks, quotas
from services.drafter.model.batch import PackedBatch
from tests.builders.batches import BLOCK_SIZE, make_batch, make_config


def choose(batch: PackedBatch, epoch: int = 0, **train: Any) -> Blocks:
    return choose_blocks(batch, epoch, make_config(**train))


def anchors_of(blocks: Blocks, document: int, start: int = 0) -> list[int]:
    return [int(anchor) - start for anchor in blocks.anchors[blocks.valid & (blocks.documents == document)]]


def test_the_draw_depends_on_seed_epoch_and_sample_only() -> None:
    long, pair = make_batch([40]), make_batch([10, 40])
    pair = replace(pair, sample_ids=np.array([7, 100]))
    alone = anchors_of(choose(long, anchors_per_document=6), 0)
    assert alone == anchors_of(choose(pair, anchors_per_document=6), 1, start=10)
    assert alone == sorted(set(alone))
    assert len(alone) == 6
    assert alone != anchors_of(choose(long, epoch=1, anchors_per_document=6), 0)
    assert alone != anchors_of(choose(replace(long, sample_ids=np.array([101])), anchors_per_document=6), 0)


def test_a_tight_budget_takes_the_first_of_the_same_draw() -> None:
    batch = make_batch([40, 40])
    roomy = choose(batch, anchors_per_document=8, anchors_per_batch=16)
    tight = choose(batch, anchors_per_document=8, anchors_per_batch=10)
    assert set(anchors_of(tight, 0)) < set(anchors_of(roomy, 0))
    assert len(anchors_of(tight, 0)) == len(anchors_of(tight, 1)) == 5


def test_quotas_are_fair() -> None:
    assert quotas([3, 5], 10) == [3, 5]
    assert quotas([1, 50, 50], 21) == [1, 10, 10]
    assert quotas([50, 50, 50], 11) == [4, 4, 3]
    assert quotas([50, 0, 2], 1) == [1, 0, 0]
    assert quotas([], 4) == []


def test_candidates_are_supervised_pairs_of_one_document() -> None:
    batch = make_batch([6, 7])
    batch.loss_mask[:] = [1, 1, 0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1]
    blocks = next(all_blocks(batch, make_config()))
    assert blocks.anchors[blocks.valid].tolist() == [0, 4, 8, 9]
    assert blocks.documents[blocks.valid].tolist() == [0, 0, 1, 1]


def test_labels_are_a_contiguous_prefix_of_the_document() -> None:
    batch = make_batch([6, 9])
    batch.loss_mask[:] = [0, 0, 1, 1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]
    blocks = next(all_blocks(batch, make_config()))
    for block in np.flatnonzero(blocks.valid):
        anchor, document = blocks.anchors[block], blocks.documents[block]
        assert blocks.anchor_tokens[block] == batch.input_ids[anchor]
        expected = []
        for row in range(anchor + 1, anchor + BLOCK_SIZE):
            if row >= batch.cu_seqlens[document + 1] or not batch.loss_mask[row]:
                break
            expected.append(int(batch.input_ids[row]))
        assert expected
        assert blocks.label_mask[block].tolist() == [True] * len(expected) + [False] * (BLOCK_SIZE - 1 - len(expected))
        assert blocks.labels[block, : len(expected)].tolist() == expected


def test_the_shape_is_constant_and_padding_has_no_labels() -> None:
    for lengths in ([4], [30, 30], [2, 2]):
        blocks = choose(make_batch(lengths), anchors_per_batch=16)
        assert blocks.anchor_tokens.shape == (16,)
        assert blocks.label_mask.shape == blocks.labels.shape == (16, BLOCK_SIZE - 1)
        assert not blocks.label_mask[~blocks.valid].any()
        assert blocks.label_mask[blocks.valid][:, 0].all()
    assert not choose(make_batch([2, 2])).valid.any()  # no supervised pair at all


def test_labels_may_go_on_behind_a_gap() -> None:
    batch = make_batch([6], prompt=0)
    gap = replace(batch, loss_mask=np.array([True, True, False, True, True, True]))
    strict, loose = (choose(gap, anchors_per_batch=4, contiguous_prefix=prefix) for prefix in (True, False))
    assert strict.anchors.tolist() == loose.anchors.tolist() == [0, 3, 4, 0]
    assert strict.label_mask[0].tolist() == [True, False, False]
    assert loose.label_mask[0].tolist() == [True, False, True]
    assert loose.labels[0].tolist() == [batch.input_ids[1], 0, batch.input_ids[3]]


@pytest.mark.parametrize(("num_anchors", "num_blocks"), [(0, 32), (1, 32), (32, 32), (33, 64), (95, 96), (97, 100), (100, 100)])
def test_a_batch_has_no_more_blocks_than_fill_the_last_tile(num_anchors: int, num_blocks: int) -> None:
    blocks = choose(make_batch([num_anchors + 1], prompt=0), anchors_per_batch=100)  # 32 blocks of 4 rows fill a tile
    assert (int(blocks.valid.sum()), len(blocks.anchors), len(blocks.labels)) == (num_anchors, num_blocks, num_blocks)


def test_evaluation_covers_every_candidate_once() -> None:
    batch = make_batch([30, 3, 20])
    chunks = list(all_blocks(batch, make_config(anchors_per_batch=7)))
    anchors = np.concatenate([blocks.anchors[blocks.valid] for blocks in chunks])
    assert all(len(blocks.anchors) == 7 for blocks in chunks)
    assert anchors.tolist() == [*range(2, 29), *range(35, 52)]
