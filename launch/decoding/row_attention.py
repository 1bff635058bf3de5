"""Attention of blocks that each continue a context of their own, in one call: what R rows cost grows with R only.

Shapes: R rows, B block size, M = R * B block rows, C columns (the longest context and a block), Hq query heads, Hkv key and
value heads, G = Hq / Hkv, D head_dim.
"""

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from common.config import DraftConfig
from launch.decoding.contexts import Places
from services.drafter.model.attention import KeysValues, visible
from services.drafter.model.visibility import BlockAnchors, Ints, in_one_sequence, key_runs


class RowAttention:
    """Of the blocks behind contexts of these lengths, int64 [R]; `own` is where their rows come.

    The query heads of a key head ask as so many further rows, so that no kernel has to copy keys for them.

    Attributes:
        mask: bool [R, 1, G * B, C].
    """

    def __init__(self, lengths: Ints, own: Places, config: DraftConfig, sliding_window: int) -> None:
        block_size, group = config.block_size, config.num_attention_heads // config.num_key_value_heads
        numbers = np.arange(len(lengths))
        blocks = BlockAnchors(lengths, np.zeros_like(lengths), np.ones(len(lengths), dtype=bool))
        runs = key_runs(blocks, block_size, sliding_window, np.arange(len(lengths) * block_size))
        runs = in_one_sequence(runs, np.repeat(lengths - numbers * block_size, block_size))
        mask = visible(runs, int(lengths.max()) + block_size, own.columns.device)
        self.mask = mask.view(len(lengths), 1, block_size, -1).repeat(1, 1, group, 1)
        self._own = own

    def __call__(self, query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        """See `Attend`, but the context is [R, Hkv, C, D] each and gets the own rows written into it."""
        self._own.fill(context, own)
        num_rows, num_key_heads, _, depth = context[0].shape
        asking = query.view(num_key_heads, -1, num_rows, query.shape[1] // num_rows, depth).permute(2, 0, 1, 3, 4).flatten(2, 3)
        output = F.scaled_dot_product_attention(asking, *context, attn_mask=self.mask)
        heads = output.reshape(num_rows, len(query), -1, depth)  # on a GPU the kernel decides how the output lies
        return heads.transpose(1, 2).reshape(query.shape[1], -1)
