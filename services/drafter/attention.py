"""Which rows a block of draft tokens may look at, and dense attention under such a mask.

Shapes: T context rows, N blocks (one per anchor), B block size, Q = N * B block rows, S = T + Q keys,
Hq query heads, Hkv key and value heads, D head_dim.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def visibility_mask(
    anchors: Tensor,
    block_documents: Tensor,
    context_documents: Tensor,
    block_valid: Tensor,
    block_size: int,
    sliding_window: int,
) -> Tensor:
    """True where a block row (first axis) may look at a key: the context rows first, then the block rows.

    A block at anchor a sees the context strictly before a of its own document, and itself: a full layer in both
    directions, a sliding layer causally. In a sliding layer the row at a + offset sees no key before
    a + offset - (W - 1). Rows of invalid blocks see only their own block, and nobody else sees them.

    Args:
        anchors: int64 [N], the packed row of each anchor; T for the block that continues the context.
        block_documents: int64 [N], the document of each block.
        context_documents: int64 [T], the document of each context row.
        block_valid: bool [N], False for padding.
        block_size: B.
        sliding_window: W; 0 for a full layer.

    Returns:
        bool [Q, T + Q].
    """
    num_context, device = context_documents.shape[0], anchors.device
    offsets = torch.arange(block_size, device=device).repeat(anchors.shape[0])
    anchors, documents = anchors.repeat_interleave(block_size), block_documents.repeat_interleave(block_size)
    blocks = torch.arange(anchors.shape[0], device=device) // block_size
    rows = torch.arange(num_context, device=device)

    own_document = documents[:, None] == context_documents[None, :]
    context = own_document & (rows[None, :] < anchors[:, None]) & block_valid.repeat_interleave(block_size)[:, None]
    inside = blocks[:, None] == blocks[None, :]
    if sliding_window:
        distance = offsets[:, None] - offsets[None, :]
        context &= rows[None, :] > (anchors + offsets)[:, None] - sliding_window
        inside = inside & (distance >= 0) & (distance < sliding_window)
    return torch.cat([context, inside], dim=1)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Dense attention with grouped key and value heads, scaled by 1 / sqrt(D).

    Args:
        query: [Hq, Q, D].
        key: [Hkv, S, D].
        value: [Hkv, S, D].
        mask: bool [Q, S]; every row has at least one True.

    Returns:
        [Q, Hq * D].
    """
    grouped = query.shape[0] != key.shape[0]
    output = F.scaled_dot_product_attention(query[None], key[None], value[None], attn_mask=mask, enable_gqa=grouped)
    return output[0].transpose(0, 1).flatten(1)
