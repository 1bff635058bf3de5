"""Visible keys as runs, and the attention tiles that the runs touch; numpy on the CPU.

Shapes: M query rows, S keys.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TILE = 128  # rows and keys of a tile of the attention
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class KeyRuns(NamedTuple):
    """Two runs of keys for each of M query rows, from `start` to before `end`; every own run holds the row itself."""

    start: Ints  # [M] context rows
    end: Ints
    own_start: Ints  # [M] block rows
    own_end: Ints


def sweeps_of_rows(start: Ints, end: Ints) -> Ints:
    """Return the tiles of keys that each tile of query rows has to visit, from one run per row [M]: [ceil(M / TILE), 4].

    The four tile numbers ascend: the first of the left edge, of the middle that all rows see in full, of the right edge, and
    the first tile that no row sees any more.
    """
    missing = -len(start) % TILE
    start, end = (np.pad(part, (0, missing), mode="edge").reshape(-1, TILE) for part in (start, end))
    some = end > start
    first = np.where(some, start, np.iinfo(np.int64).max).min(1) // TILE
    last = -(-np.where(some, end, 0).max(1) // TILE)
    whole, cut = -(-start.max(1) // TILE), np.where(some.all(1), end.min(1) // TILE, 0)
    return _as_sweeps(np.minimum(first, last), whole, cut, last)


def sweeps_of_keys(of_rows: Ints, num_tiles: int) -> Ints:
    """Transpose sweeps: return the tiles of rows that have to visit each tile of keys, [num_tiles, 4]."""
    first, whole, cut, last = of_rows.T[..., None]
    tile = np.arange(num_tiles)
    seen, filled = ((tile >= first) & (tile < last)).T, ((tile >= whole) & (tile < cut)).T  # [num_tiles, tiles of rows]
    whole, cut = _edges(filled)
    return _as_sweeps(_edges(seen)[0], np.where(cut - whole == filled.sum(1), whole, cut), cut, _edges(seen)[1])


def _edges(marked: Bools) -> tuple[Ints, Ints]:
    """Return first and past-the-last marked column of each row, or (0, 0)."""
    some, width = marked.any(1), marked.shape[1]
    return np.where(some, marked.argmax(1), 0), np.where(some, width - marked[:, ::-1].argmax(1), 0)


def _as_sweeps(first: Ints, whole: Ints, cut: Ints, last: Ints) -> Ints:
    """Return sweeps [n, 4], ascending; if no tile is visible in whole, all tiles count as cut."""
    whole = np.where(cut > whole, whole, last)
    return np.stack([first, whole, np.maximum(whole, cut), last], axis=1)
