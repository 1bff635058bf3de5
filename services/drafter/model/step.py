"""Forward of one packed batch, from blocks, attention, draft model and head to the loss.

Shapes: T packed rows, H hidden, V vocabulary, N blocks, B block size, Q = N * B block rows, M wanted rows among them,
R labelled rows.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common.config import Config
from common.device.upload import upload
from services.drafter.model.anchors import Blocks
from services.drafter.model.attention import Attend, make_attention
from services.drafter.model.batch import Ints, PackedBatch
from services.drafter.model.loss import Head, decay_weights, dpace_weights, frozen_head_loss
from services.drafter.model.model import DraftModel
from services.drafter.model.step_sums import StepSums
from services.drafter.model.visibility import BlockAnchors, key_runs

HEAD_CHUNK_ROWS = 1536  # 0.8 GB of bfloat16 logits at a vocabulary of 248,320


def block_loss(
    model: DraftModel, embed_weight: Tensor, head: Head, batch: PackedBatch, blocks: Blocks, config: Config
) -> StepSums:
    """Compute loss and counts of one batch without waiting for the device; embedding and head are the target's, [V, H]."""
    device, (num_blocks, num_slots) = batch.hidden_states.device, blocks.labels.shape
    block, slot = np.nonzero(blocks.label_mask)
    labelled = block * (num_slots + 1) + slot + 1
    filling = labelled[-1:] if len(labelled) else [0]  # keeps M constant; the last row repeats, so its tile sees no more keys
    wanted = np.append(labelled, np.repeat(filling, num_blocks * num_slots - len(labelled)))
    hidden = block_hidden(model, embed_weight, batch, blocks, config, wanted)[: len(block)]
    labels = upload(blocks.labels[blocks.label_mask], device)
    losses, predictions = frozen_head_loss(hidden, head, labels, HEAD_CHUNK_ROWS)

    cells, label_mask = upload(block * num_slots + slot, device), upload(blocks.label_mask, device)
    correct = _on_grid(predictions == labels, cells, label_mask)
    if config.train.loss == "dpace":
        weights = dpace_weights(_on_grid(losses.detach(), cells, label_mask), label_mask).flatten()[cells]
        divisor = blocks.label_mask.any(1).sum(dtype=np.float64)
    else:
        decay = decay_weights(num_slots + 1, config.train.decay_gamma)[slot]
        weights, divisor = upload(decay, device), decay.sum(dtype=np.float64)
    counted = upload(np.append(divisor, blocks.label_mask.sum(0)).astype(np.float32), device)
    loss, accepted = (losses * weights).sum(), correct.cumprod(1).sum()
    return StepSums.of(loss, counted[0], accepted, correct.sum(0), counted[1:])


def _on_grid(values: Tensor, cells: Tensor, label_mask: Tensor) -> Tensor:
    """Return float32 [N, B - 1] with the values [R] in the cells with these flat indices, 0 elsewhere."""
    grid = torch.zeros(label_mask.shape, device=values.device)
    grid.view(-1)[cells] = values.float()
    return grid


@torch.no_grad()
def predict_blocks(
    model: DraftModel, embed_weight: Tensor, head_weight: Tensor, batch: PackedBatch, blocks: Blocks, config: Config
) -> Tensor:
    """Return the greedy draft of every block, int64 [N, B - 1] on the device; rows of invalid blocks are meaningless."""
    num_blocks, num_slots = blocks.labels.shape
    wanted = np.arange(num_blocks * (num_slots + 1)).reshape(num_blocks, -1)[:, 1:].ravel()
    hidden = block_hidden(model, embed_weight, batch, blocks, config, wanted)
    predictions = [(rows.to(head_weight.dtype) @ head_weight.T).argmax(1) for rows in torch.split(hidden, HEAD_CHUNK_ROWS)]
    return torch.cat(predictions).view(num_blocks, num_slots)


def block_hidden(
    model: DraftModel, embed_weight: Tensor, batch: PackedBatch, blocks: Blocks, config: Config, wanted: Ints | None = None
) -> Tensor:
    """Return the draft model's output [M, H] for the block rows numbered `wanted`, or for all."""
    device, block_size = batch.hidden_states.device, config.draft.block_size
    tokens = np.append(blocks.anchor_tokens, config.draft.mask_token_id)
    positions = batch.position_ids[upload(blocks.anchors, device)][:, None] + torch.arange(block_size, device=device)
    context = model.context_keys_values(model.project_context(batch.hidden_states), batch.position_ids)
    embeddings, attends = F.embedding(upload(tokens, device), embed_weight), _attends(model, batch, blocks, wanted, config)
    chosen = None if wanted is None else upload(wanted, device)
    hidden: Tensor = model(embeddings, positions.flatten(), context, attends, chosen)
    return hidden


def _attends(model: DraftModel, batch: PackedBatch, blocks: Blocks, wanted: Ints | None, config: Config) -> list[Attend]:
    """Return the attention of each layer. All rows are queries, except in the last layer: there only the wanted rows are."""
    anchors = BlockAnchors(blocks.anchors, batch.cu_seqlens[blocks.documents], blocks.valid)
    num_context, num_rows = len(batch.input_ids), len(blocks.anchors) * config.draft.block_size

    def attend(window: int, rows: Ints) -> Attend:
        runs = key_runs(anchors, config.draft.block_size, window, rows)
        return make_attention(runs, num_context, num_rows, config.draft, batch.hidden_states.device)

    *inner, last = model.windows
    rows = np.arange(num_rows)
    of_window = {window: attend(window, rows) for window in set(inner)}
    return [*(of_window[window] for window in inner), attend(last, rows if wanted is None else wanted)]
