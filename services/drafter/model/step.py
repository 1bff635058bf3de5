"""Forward of one packed batch, from blocks, attention, draft model and head to the loss.

Shapes: T packed rows, H hidden, V vocabulary, N blocks, B block size, Q = N * B block rows, M wanted rows among them,
R labelled rows, K candidates.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from common.config import Config
from common.device.upload import upload
from services.drafter.model.anchors import Blocks
from services.drafter.model.attention import Attend, make_attention
from services.drafter.model.batch import Ints, PackedBatch
from services.drafter.model.layers import take
from services.drafter.model.loss import Head, HeadLoss, decay_weights, dpace_weights, frozen_head_loss
from services.drafter.model.model import DraftModel
from services.drafter.model.selector import Candidates, selector_loss, top_candidates
from services.drafter.model.step_sums import SlotSums, StepSums
from services.drafter.model.visibility import BlockAnchors, LayerMask, key_runs

HEAD_CHUNK_ROWS = 1536  # 0.8 GB of bfloat16 logits at a vocabulary of 248,320


def block_loss(
    model: DraftModel,
    embed_weight: Tensor,
    head: Head,
    batch: PackedBatch,
    blocks: Blocks,
    config: Config,
    selector_weight: float = 1.0,
) -> StepSums:
    """Compute loss and counts of one batch without waiting for the device; embedding and head are the target's, [V, H].

    The loss of DFlash 2 adds `selector_weight` times the selector's, slot by slot under the same weights and divisor.
    """
    device, (num_blocks, num_slots) = batch.hidden_states.device, blocks.labels.shape
    block, slot = np.nonzero(blocks.label_mask)
    labelled = block * (num_slots + 1) + slot + 1
    filling = labelled[-1:] if len(labelled) else [0]  # keeps M constant; the last row repeats, so its tile sees no more keys
    wanted = np.append(labelled, np.repeat(filling, num_blocks * num_slots - len(labelled)))
    hidden = block_hidden(model, embed_weight, batch, blocks, config, wanted)[: len(block)]
    labels = upload(blocks.labels[blocks.label_mask], device)
    selector, num_candidates = model.candidate_selector, config.draft.num_candidates
    found = frozen_head_loss(model.for_head(hidden), head, labels, HEAD_CHUNK_ROWS, num_candidates, model.logit_softcap)
    chosen, of_selector = found.predictions, torch.zeros_like(found.losses)
    if selector is not None:
        previous = np.concatenate([blocks.anchor_tokens[:, None], blocks.tokens[:, :-1]], axis=1)[blocks.label_mask]
        scores = selector(hidden, found.candidates, upload(previous, device))
        chosen = found.candidates.tokens.gather(1, scores.argmax(1, keepdim=True))[:, 0]
        of_selector = selector_loss(scores, found.candidates.tokens, labels)

    cells, label_mask = upload(block * num_slots + slot, device), upload(blocks.label_mask, device)
    if config.train.loss == "dpace":
        weights = dpace_weights(_on_grid(found.losses.detach(), cells, label_mask), label_mask).flatten()[cells]
        divisor = blocks.label_mask.any(1).sum(dtype=np.float64)
    else:
        decay = decay_weights(num_slots + 1, config.train.decay_gamma)[slot]
        weights, divisor = upload(decay, device), decay.sum(dtype=np.float64)
    counted = upload(np.append(divisor, blocks.label_mask.sum(0)).astype(np.float32), device)
    losses = found.losses if selector is None else found.losses + selector_weight * of_selector
    slots = _count(found, chosen, labels, cells, label_mask, counted[1:])
    return StepSums.of((losses * weights).sum(), counted[0], (of_selector.detach() * weights).sum(), slots)


def _count(found: HeadLoss, chosen: Tensor, labels: Tensor, cells: Tensor, label_mask: Tensor, num_labels: Tensor) -> SlotSums:
    """Count chosen tokens, predictions and candidates that are right: per slot, and up to the first that is not."""
    is_candidate = (found.candidates.tokens == labels[:, None]).any(1)
    right = [chosen == labels, found.predictions == labels, is_candidate]
    correct, unary, recalled = (_on_grid(cell, cells, label_mask) for cell in right)
    accepted, accepted_unary, accepted_oracle = (grid.cumprod(1).sum() for grid in (correct, unary, recalled))
    return SlotSums(accepted, accepted_unary, accepted_oracle, correct.sum(0), recalled.sum(0), num_labels)


def _on_grid(values: Tensor, cells: Tensor, label_mask: Tensor) -> Tensor:
    """Return float32 [N, B - 1] with the values [R] in the cells with these flat indices, 0 elsewhere."""
    grid = torch.zeros(label_mask.shape, device=values.device)
    grid.view(-1)[cells] = values.float()
    return grid


class Drafts(NamedTuple):
    """The greedy drafts of every block, on the device; rows of invalid blocks are meaningless."""

    tokens: Tensor  # int64 [N, B - 1], as served
    unary: Tensor  # int64 [N, B - 1], the likeliest token of each slot; equal to `tokens` without a selector
    candidates: Tensor  # int64 [N, B - 1, K]


@torch.no_grad()
def predict_blocks(
    model: DraftModel, embed_weight: Tensor, head_weight: Tensor, batch: PackedBatch, blocks: Blocks, config: Config
) -> Drafts:
    """Draft every block greedily, without its labels."""
    num_blocks, num_slots = blocks.labels.shape
    wanted = np.arange(num_blocks * (num_slots + 1)).reshape(num_blocks, -1)[:, 1:].ravel()
    hidden = block_hidden(model, embed_weight, batch, blocks, config, wanted)
    unary, found = [], []
    for rows in torch.split(hidden, HEAD_CHUNK_ROWS):
        logits = model.for_head(rows).to(head_weight.dtype) @ head_weight.T
        unary.append(logits.argmax(1))
        if model.candidate_selector is not None:
            found.append(top_candidates(logits, config.draft.num_candidates, model.logit_softcap))
    likeliest = torch.cat(unary).view(num_blocks, num_slots)
    if model.candidate_selector is None:
        return Drafts(likeliest, likeliest, likeliest[..., None])
    candidates = Candidates(*(torch.cat(parts).view(num_blocks, num_slots, -1) for parts in zip(*found, strict=True)))
    anchors = upload(blocks.anchor_tokens, hidden.device)
    tokens = model.candidate_selector.select(hidden.view(num_blocks, num_slots, -1), candidates, anchors)
    return Drafts(tokens, likeliest, candidates.tokens)


def block_hidden(
    model: DraftModel, embed_weight: Tensor, batch: PackedBatch, blocks: Blocks, config: Config, wanted: Ints | None = None
) -> Tensor:
    """Return the draft model's output [M, H] for the block rows numbered `wanted`, or for all."""
    device, block_size = batch.hidden_states.device, config.draft.block_size
    tokens = np.append(blocks.anchor_tokens, config.draft.mask_token_id)
    positions = batch.position_ids[upload(blocks.anchors, device)][:, None] + torch.arange(block_size, device=device)
    context = model.context_keys_values(model.project_context(batch.hidden_states), batch.position_ids)
    embeddings, chosen = model.embed(upload(tokens, device), embed_weight), None if wanted is None else upload(wanted, device)
    if model.is_convolved:  # each row of the last layer reads the row before it
        attends = _attends(model, batch, blocks, None, config)
        return take(model(embeddings, positions.flatten(), context, attends), chosen)
    attends = _attends(model, batch, blocks, wanted, config)
    hidden: Tensor = model(embeddings, positions.flatten(), context, attends, chosen)
    return hidden


def _attends(model: DraftModel, batch: PackedBatch, blocks: Blocks, wanted: Ints | None, config: Config) -> list[Attend]:
    """Return the attention of each layer. All rows are queries, except in the last layer: there only the wanted rows are."""
    anchors = BlockAnchors(blocks.anchors, batch.cu_seqlens[blocks.documents], blocks.valid)
    num_context, num_rows = len(batch.input_ids), len(blocks.anchors) * config.draft.block_size

    def attend(mask: LayerMask, rows: Ints) -> Attend:
        runs = key_runs(anchors, config.draft.block_size, mask, rows)
        return make_attention(runs, num_context, num_rows, config.draft, batch.hidden_states.device)

    *inner, last = model.masks
    rows = np.arange(num_rows)
    of_mask = {mask: attend(mask, rows) for mask in set(inner)}
    return [*(of_mask[mask] for mask in inner), attend(last, rows if wanted is None else wanted)]
