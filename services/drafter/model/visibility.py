"""Visible keys of every block row, as runs; numpy on the CPU.

Shapes: T context rows, N blocks (one per anchor), B block size, N * B block rows, M query rows.
"""

from typing import NamedTuple

import numpy as np

from common.draft_config import DraftConfig, LayerType
from services.drafter.kernels.key_runs import KeyRuns
from services.drafter.model.batch import Bools, Ints


class BlockAnchors(NamedTuple):
    """Anchors of N blocks in the context."""

    anchors: Ints  # [N] packed row of each anchor; T for the block that continues the context
    starts: Ints  # [N] first row of the anchor's document
    valid: Bools  # [N] False for padding


class LayerMask(NamedTuple):
    """The visibility of one layer."""

    window: int  # W: a row sees no key before its own position - (W - 1); 0 where it sees all
    causal: bool  # whether a row sees no later row of its block

    @classmethod
    def of(cls, draft: DraftConfig, kind: LayerType) -> "LayerMask":
        """Return the mask of a layer: unless `draft.is_causal` says it for all, sliding layers are causal, full ones not."""
        is_sliding = kind == "sliding_attention"
        return cls(draft.sliding_window if is_sliding else 0, is_sliding if draft.is_causal is None else draft.is_causal)


def key_runs(blocks: BlockAnchors, block_size: int, mask: LayerMask, rows: Ints) -> KeyRuns:
    """Return the runs of keys that are visible to the M block rows numbered `rows`: block * B + offset.

    A block at anchor a sees the context strictly before a of its own document, and itself, in both directions or causally.
    With a window W the row at a + offset sees no key before a + offset - (W - 1). Rows of invalid blocks see only their own
    block, and no other row sees them.
    """
    block, offset = np.divmod(rows, block_size)
    end = np.where(blocks.valid, blocks.anchors, 0)[block]
    start = np.where(blocks.valid, blocks.starts, 0)[block]
    own_start = block * block_size
    own_end = rows + 1 if mask.causal else own_start + block_size
    if mask.window:
        start = np.clip(end + offset - (mask.window - 1), start, end)
        own_start = np.maximum(own_start, rows - (mask.window - 1))
    return KeyRuns(start, end, own_start, own_end)
