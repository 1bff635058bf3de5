"""Choice of the blocks of a packed batch: their anchors, inputs and labels; numpy on the CPU.

Shapes: N blocks, B block size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from common.config import Config
from services.drafter.kernels.key_runs import TILE
from services.drafter.model.batch import Bools, Ints, PackedBatch
from services.drafter.model.seeding import sample_sequence


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """N blocks; unused ones fill up the last tile at the end, invalid and without labels."""

    anchors: Ints  # [N] packed row of the anchor
    documents: Ints  # [N] document of the anchor in the batch
    valid: Bools  # [N]
    anchor_tokens: Ints  # [N]
    tokens: Ints  # [N, B - 1] the text of slot 1, 2, ..., supervised or not; 0 past the end of the document
    labels: Ints  # [N, B - 1] the true token of slot 1, 2, ...; 0 where there is none
    label_mask: Bools  # [N, B - 1] a contiguous prefix of every row, unless train.contiguous_prefix is off


def choose_blocks(batch: PackedBatch, epoch: int, config: Config) -> Blocks:
    """Draw the blocks of one training batch.

    The order of a document's candidates depends on (seed, epoch, sample id) only; the batch decides no more than how
    many of them are taken. Random anchors beat a fixed tiling (arXiv 2602.06036, table 13).
    """
    candidates = _candidates(batch)
    wanted = [min(len(rows), config.train.anchors_per_document) for rows in candidates]
    chosen = []
    for rows, quota, sample_id in zip(candidates, quotas(wanted, config.num_anchors), batch.sample_ids, strict=True):
        sequence = sample_sequence(config.seed, epoch, int(sample_id), "anchors")
        order = np.random.Generator(np.random.Philox(sequence)).permutation(len(rows))
        chosen.append(np.sort(rows[order[:quota]]))
    return _blocks(np.concatenate(chosen), batch, config)


def all_blocks(batch: PackedBatch, config: Config) -> Iterator[Blocks]:
    """Yield every candidate of a batch in order, for evaluation; no more blocks at a time than in training."""
    anchors = np.concatenate(_candidates(batch))
    for first in range(0, len(anchors), config.num_anchors):
        yield _blocks(anchors[first : first + config.num_anchors], batch, config)


def anchors_of_tiles(block_size: int) -> int:
    """Return the smallest number of anchors whose rows fill whole tiles of the attention."""
    return TILE // math.gcd(TILE, block_size)


def quotas(wanted: list[int], budget: int) -> list[int]:
    """Share a budget by max-min fairness: no document gets more than it wants, and small demands are met in full.

    A remainder that cannot be shared evenly goes, one each, to the documents that want most, the first of them first.
    """
    granted = [0] * len(wanted)
    ascending = sorted(range(len(wanted)), key=lambda document: (wanted[document], -document))
    for served, document in enumerate(ascending):
        granted[document] = min(wanted[document], budget // (len(wanted) - served))
        budget -= granted[document]
    return granted


def _candidates(batch: PackedBatch) -> list[Ints]:
    """Return the supervised rows of each document that are followed by a supervised row of the same document."""
    masks = [(start, batch.loss_mask[start:end]) for start, end in pairwise(batch.cu_seqlens)]
    return [np.flatnonzero(mask[:-1] & mask[1:]) + start for start, mask in masks]


def _blocks(anchors: Ints, batch: PackedBatch, config: Config) -> Blocks:
    block_size, step = config.draft.block_size, anchors_of_tiles(config.draft.block_size)
    num_blocks = min(max(1, math.ceil(len(anchors) / step)) * step, config.num_anchors)
    valid = np.arange(num_blocks) < len(anchors)
    anchors = np.pad(anchors, (0, num_blocks - len(anchors)))
    documents = np.searchsorted(batch.cu_seqlens, anchors, side="right") - 1
    rows = anchors[:, None] + np.arange(1, block_size)
    inside = (rows < batch.cu_seqlens[documents + 1][:, None]) & valid[:, None]
    rows = np.where(inside, rows, 0)
    label_mask = inside & batch.loss_mask[rows]
    if config.train.contiguous_prefix:
        label_mask = np.logical_and.accumulate(label_mask, axis=1)
    return Blocks(
        anchors=anchors,
        documents=documents,
        valid=valid,
        anchor_tokens=np.where(valid, batch.input_ids[anchors], config.draft.mask_token_id),
        tokens=np.where(inside, batch.input_ids[rows], 0),
        labels=np.where(label_mask, batch.input_ids[rows], 0),
        label_mask=label_mask,
    )
