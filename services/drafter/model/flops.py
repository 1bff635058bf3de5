"""Floating-point operations of one batch, forward and backward: those of the matrix products that must be done."""

import numpy as np

from common.config import Config
from services.drafter.model.anchors import Blocks
from services.drafter.model.batch import Ints
from services.drafter.model.visibility import BlockAnchors, LayerMask, key_runs


def batch_flops(config: Config, blocks: Blocks, cu_seqlens: Ints) -> float:
    """Count the operations of one batch: two for a multiplication with an addition, two products for a product's backward.

    Products that the step avoids are not counted: projections of equal rows in the first layer, rows without a label in the
    last layer, the product for the head's gradient, and gradients of the features. Attention counts visible pairs only.
    """
    draft, hidden, num_context = config.draft, config.shape.hidden_size, int(cu_seqlens[-1])
    num_blocks, num_rows = len(blocks.anchors), len(blocks.anchors) * draft.block_size
    queries, keys = draft.num_attention_heads * draft.head_dim, 2 * draft.num_key_value_heads * draft.head_dim
    num_labels = int(blocks.label_mask.sum())
    anchors = BlockAnchors(blocks.anchors, cu_seqlens[blocks.documents], blocks.valid)
    kernel = 2 * 2 * hidden // draft.conv_group_size if draft.kind == "dflash2" else 0  # of a convolution: 2 sides, 2 taps
    products = num_labels * hidden * draft.selector_rank if draft.kind == "dflash2" else 0.0  # that a backward pass doubles
    for layer, kind in enumerate(draft.layer_types):
        is_last = layer == draft.num_layers - 1
        distinct = num_rows if layer else (2 * num_blocks + 1 if kernel else num_blocks + 1)
        num_queries, num_wanted = (num_labels, num_labels) if is_last else (distinct, num_rows)
        products += hidden * (num_queries * queries + (distinct + num_context) * keys)
        products += num_wanted * hidden * (queries + 3 * draft.intermediate_size + kernel)
        products += (num_rows if layer else num_blocks + 1) * hidden * kernel
        runs = key_runs(anchors, draft.block_size, LayerMask.of(draft, kind), np.arange(num_rows))
        num_pairs = float((runs.end - runs.start + runs.own_end - runs.own_start).sum())
        products += 2 * queries * num_pairs
    once = num_context * hidden**2 * len(draft.tap_layers) * 2 + num_labels * hidden * config.shape.vocab_size * 2
    return 2.0 * (3 * products + once)
