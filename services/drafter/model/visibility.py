"""Visible keys of every block row, as runs; numpy on the CPU.

Shapes: T context rows, N blocks (one per anchor), B block size, N * B block rows, M query rows.
"""

from typing import NamedTuple

import numpy as np

from services.drafter.kernels.key_runs import KeyRuns
from services.drafter.model.batch import Bools, Ints


class BlockAnchors(NamedTuple):
    """Anchors of N blocks in the context."""

    anchors: Ints  # [N] packed row of each anchor; T for the block that continues the context
    starts: Ints  # [N] first row of the anchor's document
    valid: Bools  # [N] False for padding


def key_runs(blocks: BlockAnchors, block_size: int, sliding_window: int, rows: Ints) -> KeyRuns:
    """Return the runs of keys that are visible to the M block rows numbered `rows`: block * B + offset.

    A block at anchor a sees the context strictly before a of its own document, and itself: a full layer (a
    `sliding_window` W of 0) in both directions, a sliding layer causally. In a sliding layer the row at a + offset sees
    no key before a + offset - (W - 1). Rows of invalid blocks see only their own block, and no other row sees them.
    """
    block, offset = np.divmod(rows, block_size)
    end = np.where(blocks.valid, blocks.anchors, 0)[block]
    start = np.where(blocks.valid, blocks.starts, 0)[block]
    own_start = block * block_size
    if not sliding_window:
        return KeyRuns(start, end, own_start, own_start + block_size)
    oldest = end + offset - (sliding_window - 1)
    return KeyRuns(np.clip(oldest, start, end), end, np.maximum(own_start, rows - (sliding_window - 1)), rows + 1)
