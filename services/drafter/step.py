"""The forward of one packed batch: where blocks, masks, draft model, head and loss meet.

Shapes: T packed rows, D documents, K taps, H hidden, V vocabulary, N blocks, B block size, Q = N * B block rows.
"""

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from common.config import Config
from services.drafter.anchors import Blocks
from services.drafter.attention import visibility_mask
from services.drafter.loss import decay_weights, frozen_head_loss
from services.drafter.model import DraftModel

HEAD_CHUNK_ROWS = 1024  # 1 GB of float32 logits at a vocabulary of 248,320


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """D documents back to back without padding: what the device computes on, and what the CPU plans with."""

    hidden_states: Tensor  # [T, K, H] on the device
    position_ids: Tensor  # int64 [T] on the device, from 0 in every document
    documents: Tensor  # int64 [T] on the device, 0 .. D - 1
    input_ids: NDArray[np.int64]  # [T]
    loss_mask: NDArray[np.bool_]  # [T]
    cu_seqlens: NDArray[np.int64]  # [D + 1]
    sample_ids: NDArray[np.int64]  # [D]


def num_sums(block_size: int) -> int:
    """Length M of what `block_loss` returns."""
    return 2 + 2 * (block_size - 1)


def block_loss(
    model: DraftModel, embed_weight: Tensor, head_weight: Tensor, batch: PackedBatch, blocks: Blocks, config: Config
) -> Tensor:
    """The loss of one batch and what is counted with it; never waits for the device.

    Args:
        model: the draft model.
        embed_weight: [V, H], the target's.
        head_weight: [V, H], the target's.
        batch: features and positions.
        blocks: from `anchors.choose_blocks`.
        config: the decay of the loss.

    Returns:
        float32 [2 + 2 * (B - 1)]: the weighted sum of cross entropies (call backward on this one), the sum of weights,
        then for every slot the number of correct predictions, then for every slot the number of labels.
    """
    device, num_slots = batch.hidden_states.device, blocks.labels.shape[1]
    block, slot = np.nonzero(blocks.label_mask)
    weights = decay_weights(num_slots + 1, config.train.decay_gamma)[slot]
    rows = upload(block * (num_slots + 1) + slot + 1, device)
    hidden = block_hidden(model, embed_weight, batch, blocks).index_select(0, rows)
    labels = upload(blocks.labels[blocks.label_mask], device)
    loss, correct = frozen_head_loss(hidden, head_weight, labels, upload(weights, device), HEAD_CHUNK_ROWS)

    correct_per_slot = torch.zeros(num_slots, device=device).index_add_(0, upload(slot, device), correct.float())
    labels_per_slot = blocks.label_mask.sum(0)
    counted = upload(np.append(weights.sum(dtype=np.float64), labels_per_slot).astype(np.float32), device)
    return torch.cat([loss[None], counted[:1], correct_per_slot, counted[1:]])


@torch.no_grad()
def predict_blocks(model: DraftModel, embed_weight: Tensor, head_weight: Tensor, batch: PackedBatch, blocks: Blocks) -> Tensor:
    """The greedy draft of every block: int64 [N, B - 1] on the device; rows of invalid blocks mean nothing."""
    num_blocks, block_size = blocks.tokens.shape
    hidden = block_hidden(model, embed_weight, batch, blocks).view(num_blocks, block_size, -1)[:, 1:].flatten(0, 1)
    chunks = [hidden[first : first + HEAD_CHUNK_ROWS] for first in range(0, hidden.shape[0], HEAD_CHUNK_ROWS)]
    predictions = [(rows.to(head_weight.dtype) @ head_weight.T).argmax(1) for rows in chunks]
    return torch.cat(predictions).view(num_blocks, block_size - 1)


def block_hidden(model: DraftModel, embed_weight: Tensor, batch: PackedBatch, blocks: Blocks) -> Tensor:
    """The draft model's output [Q, H] for every row of every block."""
    device, block_size = batch.hidden_states.device, blocks.tokens.shape[1]
    anchors, documents, valid = (upload(array, device) for array in (blocks.anchors, blocks.documents, blocks.valid))
    masks = {
        layer_type: visibility_mask(anchors, documents, batch.documents, valid, block_size, window)
        for layer_type, window in model.windows.items()
    }
    embeddings = F.embedding(upload(blocks.tokens.ravel(), device), embed_weight)
    positions = batch.position_ids[anchors][:, None] + torch.arange(block_size, device=device)
    context = model.context_keys_values(model.project_context(batch.hidden_states), batch.position_ids)
    hidden: Tensor = model(embeddings, positions.flatten(), context, masks)
    return hidden


def upload(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """Copy to the device without waiting: a GPU copies from pinned memory, which torch keeps until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
