"""Exact greedy acceptance without decoding, on data that are the target's own greedy answers.

Shapes: T packed rows, D documents, N blocks, B block size, G groups (set and category of a sample).
"""

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from msgspec.structs import asdict
from numpy.typing import NDArray
from torch import Tensor

from common.acceptance import Acceptance, Evaluation, SelectorReport, SetAcceptance
from common.config import Config
from common.data.held_out import HeldOut
from common.device.upload import upload
from services.drafter.model.anchors import Blocks, all_blocks
from services.drafter.model.batch import PackedBatch
from services.drafter.model.model import DraftModel
from services.drafter.model.step import predict_blocks


class AcceptanceCount:
    """Adds up one evaluation, batch by batch, as rounds: int64 [G + 1, B], with a selector [G + 5, B].

    Row g counts the rounds of group g that emitted 1 .. B tokens, row G those of the control. The control runs the
    same text on the hidden states of another document: any acceptance that is left did not come through the slots.
    With a selector the rows after them count the rounds of the likeliest tokens, those of an oracle among the candidates,
    and for slot k = 1 .. B - 1 the labels among the candidates and all labels, from column 1 on.
    """

    def __init__(self, model: DraftModel, frozen: tuple[Tensor, Tensor], config: Config) -> None:
        self._model = model
        self._embedding, self._head = frozen
        self._config = config
        groups = HeldOut.open(config.data).groups()
        self._groups = sorted(set(groups))
        indices = {group: index for index, group in enumerate(self._groups)}
        self._group_of = np.array([indices[group] for group in groups], dtype=np.int64)
        num_rows = len(self._groups) + (1 if model.candidate_selector is None else 5)
        self.rounds = np.zeros((num_rows, config.draft.block_size), dtype=np.int64)

    def add(self, batch: PackedBatch) -> None:
        """Measure one batch."""
        counts, control = self._measure(batch), self._measure(with_features_of_another_document(batch))
        np.add.at(self.rounds, self._group_of[batch.sample_ids], counts.chosen)
        self.rounds[len(self._groups)] += control.chosen.sum(0)
        self.rounds[len(self._groups) + 1 :] += counts.of_selector

    def summarise(self, rounds: Tensor, step: int) -> Evaluation:
        """Return the evaluation that counted these rounds after `step` optimizer steps."""
        counts, *of_selector = np.split(rounds.cpu().numpy(), [len(self._groups) + 1])
        return Evaluation(
            **asdict(summarise(counts[:-1].sum(0))),
            step=step,
            acceptance_other_prompt=summarise(counts[-1]).acceptance,
            sets={name: self._summarise_set(name, counts) for name in self._config.data.eval_sets},
            selector=_summarise_selector(*of_selector[0]) if len(of_selector[0]) else None,
        )

    def _summarise_set(self, name: str, rounds: NDArray[np.int64]) -> SetAcceptance:
        members = [index for index, (owner, _) in enumerate(self._groups) if owner == name]
        categories = {self._groups[index][1]: summarise(rounds[index]) for index in members if self._groups[index][1]}
        return SetAcceptance(**asdict(summarise(rounds[members].sum(0))), categories=categories)

    def _measure(self, batch: PackedBatch) -> "BatchRounds":
        return evaluate_batch(self._model, self._embedding, self._head, batch, self._config)


class BatchRounds(NamedTuple):
    """The rounds of one batch."""

    chosen: NDArray[np.int64]  # [D, B]: per document, the rounds that emitted 1, 2 .. B tokens
    of_selector: NDArray[np.int64]  # [4, B] as the last rows of `AcceptanceCount.rounds`; [0, B] without a selector


def evaluate_batch(
    model: DraftModel, embed_weight: Tensor, head_weight: Tensor, batch: PackedBatch, config: Config
) -> BatchRounds:
    """Draft a block at every anchor of a batch and count the rounds of its answers (waits for the device).

    The counts add up over batches and ranks. Drafts are made without the labels; only the counting reads them.
    """
    accepted = np.zeros((3, len(batch.input_ids)), dtype=np.int64)
    recall = np.zeros((2, config.draft.block_size), dtype=np.int64)
    for blocks in all_blocks(batch, config):
        drafts = predict_blocks(model, embed_weight, head_weight, batch, blocks, config)
        tokens, unary, candidates = (part.cpu().numpy() for part in drafts)
        oracle = np.where((candidates == blocks.labels[..., None]).any(2), blocks.labels, -1)
        for row, predictions in zip(accepted, (tokens, unary, oracle), strict=True):
            row[blocks.anchors[blocks.valid]] = matching_prefix(predictions, blocks)[blocks.valid]
        recall[:, 1:] += np.stack([blocks.label_mask & (oracle == blocks.labels), blocks.label_mask]).sum(1)
    accepted[2] = stop_best(accepted[2], config.draft.block_size)
    chosen, *others = (count_rounds(row, batch.loss_mask, batch.cu_seqlens, config.draft.block_size) for row in accepted)
    of_selector = np.stack([*(rounds.sum(0) for rounds in others), *recall])
    return BatchRounds(chosen, of_selector if model.candidate_selector is not None else of_selector[:0])


def _summarise_selector(
    unary: NDArray[np.int64], oracle: NDArray[np.int64], recalled: NDArray[np.int64], labels: NDArray[np.int64]
) -> SelectorReport:
    return SelectorReport(
        acceptance_unary=summarise(unary).acceptance,
        acceptance_oracle=summarise(oracle).acceptance,
        recall_per_position=(recalled[1:] / np.maximum(labels[1:], 1)).tolist(),
    )


def summarise(rounds: NDArray[np.int64]) -> Acceptance:
    """Return the acceptance of rounds [B] that emitted 1, 2 .. B tokens."""
    num_rounds, num_tokens = int(rounds.sum()), int((rounds * np.arange(1, len(rounds) + 1)).sum())
    num_longer = np.cumsum(rounds[::-1])[::-1][1:]  # rounds that emitted more than k tokens: draft token k is one of them
    return Acceptance(
        acceptance=num_tokens / max(num_rounds, 1),
        acceptance_per_position=(num_longer / max(num_rounds, 1)).tolist(),
        num_rounds=num_rounds,
        num_tokens=num_tokens,
    )


def matching_prefix(predictions: NDArray[np.int64], blocks: Blocks) -> NDArray[np.int64]:
    """Count the leading predictions [N, B - 1] of each block that equal the supervised text: [N]."""
    matches = (predictions == blocks.labels) & blocks.label_mask
    count: NDArray[np.int64] = np.logical_and.accumulate(matches, axis=1).sum(1)
    return count


def stop_best(accepted: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """Return what to accept at every anchor, at most `accepted`, for the fewest rounds: [T].

    A longer round may end at a worse anchor, so to accept all of it is not always best. Best is to stop where the round after
    it can end last.
    """
    last = np.pad(np.arange(len(accepted)) + accepted, (0, block_size))  # the last row that a round at each anchor reaches
    after = np.lib.stride_tricks.sliding_window_view(last, block_size)[1 : len(accepted) + 1]  # [T, B]
    allowed = np.where(np.arange(block_size) <= accepted[:, None], after, -1)
    best: NDArray[np.int64] = block_size - 1 - allowed[:, ::-1].argmax(1)  # the longest of equals
    return best


def count_rounds(
    accepted: NDArray[np.int64], loss_mask: NDArray[np.bool_], cu_seqlens: NDArray[np.int64], block_size: int
) -> NDArray[np.int64]:
    """Count the rounds that greedy speculative decoding of every supervised span would take.

    The target's prefill gives the first token of a span; it is the first anchor and no round emitted it. A round at
    anchor a accepts accepted[a] drafts and adds the target's own next token, which is the next anchor. The span's last
    token (the end mark, or the limit on new tokens) ends decoding, so the last round emits what is left of the span
    and no more: a round that accepts everything up to the end has no token of the target's own. A span of n tokens
    thus emits n - 1 in its rounds, and a span of one token takes none.

    Args:
        accepted: int64 [T], accepted drafts at every anchor.
        loss_mask: bool [T].
        cu_seqlens: int64 [D + 1].
        block_size: B.

    Returns:
        int64 [D, B]: per document, the rounds that emitted 1, 2 .. B tokens.
    """
    rounds = np.zeros((len(cu_seqlens) - 1, block_size), dtype=np.int64)
    for start, end in supervised_spans(loss_mask, cu_seqlens):
        of_document = rounds[np.searchsorted(cu_seqlens, start, side="right") - 1]
        anchor = start
        while anchor < end - 1:
            num_tokens = min(int(accepted[anchor]) + 1, end - 1 - anchor)
            of_document[num_tokens - 1] += 1
            anchor += num_tokens
    return rounds


def supervised_spans(loss_mask: NDArray[np.bool_], cu_seqlens: NDArray[np.int64]) -> list[tuple[int, int]]:
    """First and past-the-last row of every run of supervised rows; runs end with their document."""
    spans = []
    for first, last in pairwise(cu_seqlens):
        edges = np.flatnonzero(np.diff(loss_mask[first:last], prepend=False, append=False)) + first
        spans += [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
    return spans


def with_features_of_another_document(batch: PackedBatch) -> PackedBatch:
    """Make the control batch: each document gets the hidden states of the next one, repeated if they are too few.

    Text, positions and labels stay, so any acceptance that is left did not come from the features. The only document of a
    batch gets zeros.
    """
    if len(batch.sample_ids) == 1:
        return replace(batch, hidden_states=torch.zeros_like(batch.hidden_states))
    starts, lengths = batch.cu_seqlens[:-1], np.diff(batch.cu_seqlens)
    donors = np.roll(np.arange(len(starts)), -1)
    rows = [starts[donor] + np.arange(length) % lengths[donor] for donor, length in zip(donors, lengths, strict=True)]
    index = upload(np.concatenate(rows), batch.hidden_states.device)
    return replace(batch, hidden_states=batch.hidden_states[index])
