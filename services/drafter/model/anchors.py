"""Choice of the blocks of a packed batch: their anchors, inputs and labels; numpy on the CPU.

Shapes: T packed rows, D documents, N blocks, B block size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from common.config import Config
from services.drafter.model.seeding import sample_sequence
from services.drafter.model.visibility import TILE

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """N blocks; unused ones fill up the last tile at the end, invalid and without labels."""

    anchors: Ints  # [N] packed row of the anchor
    documents: Ints  # [N] document of the anchor in the batch
    valid: Bools  # [N]
    anchor_tokens: Ints  # [N]
    labels: Ints  # [N, B - 1] the true token of slot 1, 2, ...; 0 where there is none
    label_mask: Bools  # [N, B - 1] a contiguous prefix of every row, unless train.contiguous_prefix is off


def choose_blocks(input_ids: Ints, loss_mask: Bools, cu_seqlens: Ints, sample_ids: Ints, epoch: int, config: Config) -> Blocks:
    """Draw the blocks of one training batch.

    The order of a document's candidates depends on (seed, epoch, sample id) only; the batch decides no more than how
    many of them are taken. Random anchors beat a fixed tiling (arXiv 2602.06036, table 13).

    Args:
        input_ids: int64 [T].
        loss_mask: bool [T].
        cu_seqlens: int64 [D + 1], the first row of each document, then T.
        sample_ids: int64 [D].
        epoch: number of the pass over the data.
        config: the seed, the block size, the mask token and the two budgets.
    """
    candidates = [_candidates(loss_mask, start, end) for start, end in pairwise(cu_seqlens)]
    wanted = [min(len(rows), config.train.anchors_per_document) for rows in candidates]
    chosen = []
    for rows, quota, sample_id in zip(candidates, quotas(wanted, config.num_anchors), sample_ids, strict=True):
        sequence = sample_sequence(config.seed, epoch, int(sample_id), "anchors")
        order = np.random.Generator(np.random.Philox(sequence)).permutation(len(rows))
        chosen.append(np.sort(rows[order[:quota]]))
    return _blocks(np.concatenate(chosen), input_ids, loss_mask, cu_seqlens, config)


def all_blocks(input_ids: Ints, loss_mask: Bools, cu_seqlens: Ints, config: Config) -> Iterator[Blocks]:
    """Yield every candidate of a batch in order, for evaluation; no more blocks at a time than in training."""
    anchors = np.concatenate([_candidates(loss_mask, start, end) for start, end in pairwise(cu_seqlens)])
    for first in range(0, len(anchors), config.num_anchors):
        part = anchors[first : first + config.num_anchors]
        yield _blocks(part, input_ids, loss_mask, cu_seqlens, config)


def anchors_of_tiles(block_size: int) -> int:
    """Return the smallest number of anchors whose rows fill whole tiles of the attention."""
    return TILE // math.gcd(TILE, block_size)


def quotas(wanted: list[int], budget: int) -> list[int]:
    """Share a budget by max-min fairness: no document gets more than it wants, small wishes are met in full.

    A remainder that cannot be shared evenly goes, one each, to the documents that want most, the first ones first.
    """
    granted = [0] * len(wanted)
    open_documents = sorted(range(len(wanted)), key=lambda document: (wanted[document], -document))
    for served, document in enumerate(open_documents):
        granted[document] = min(wanted[document], budget // (len(wanted) - served))
        budget -= granted[document]
    return granted


def _candidates(loss_mask: Bools, start: int, end: int) -> Ints:
    """Return the supervised rows of one document that are followed by a supervised row of the same document."""
    inside = loss_mask[start:end]
    return np.flatnonzero(inside[:-1] & inside[1:]) + start


def _blocks(anchors: Ints, input_ids: Ints, loss_mask: Bools, cu_seqlens: Ints, config: Config) -> Blocks:
    block_size, step = config.draft.block_size, anchors_of_tiles(config.draft.block_size)
    num_blocks = min(max(1, math.ceil(len(anchors) / step)) * step, config.num_anchors)
    valid = np.arange(num_blocks) < len(anchors)
    anchors = np.pad(anchors, (0, num_blocks - len(anchors)))
    documents = np.searchsorted(cu_seqlens, anchors, side="right") - 1
    anchor_tokens = np.where(valid, input_ids[anchors], config.draft.mask_token_id)

    rows = anchors[:, None] + np.arange(1, block_size)
    inside = (rows < cu_seqlens[documents + 1][:, None]) & valid[:, None]
    rows = np.where(inside, rows, 0)
    label_mask = inside & loss_mask[rows]
    if config.train.contiguous_prefix:
        label_mask = np.logical_and.accumulate(label_mask, axis=1)
    labels = np.where(label_mask, input_ids[rows], 0)
    return Blocks(
        anchors=anchors,
        documents=documents,
        valid=valid,
        anchor_tokens=anchor_tokens,
        labels=labels,
        label_mask=label_mask,
    )
