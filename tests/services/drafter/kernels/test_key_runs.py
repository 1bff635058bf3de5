"""Sweeps over tiles against counting visible keys."""

from typing import Any

import numpy as np
import pytest

from services.drafter.kernels.key_runs import TILE, sweeps_of_keys, sweeps_of_rows
from services.drafter.model.visibility import LayerMask, key_runs
from tests.builders.batches import random_anchors


def covered(sweeps: Any, num_tiles: int, whole: bool) -> Any:
    """Return [n, num_tiles]: True for a tile within the sweep, or within its unmasked part."""
    tile = np.arange(num_tiles)
    first, last = (1, 2) if whole else (0, 3)
    return (tile >= sweeps[:, first, None]) & (tile < sweeps[:, last, None])


@pytest.mark.parametrize("window", [0, 1, 150, 400])
@pytest.mark.parametrize("lengths", [[1500], [100, 900, 50, 1, 449]])
def test_sweeps_cover_the_visible_tiles_and_only_full_tiles_are_unmasked(lengths: list[int], window: int) -> None:
    runs = key_runs(random_anchors(lengths, 256), 4, LayerMask(window, causal=window > 0), np.arange(1024))
    key = np.arange(1536)
    seen_keys = (key >= runs.start[:, None]) & (key < runs.end[:, None])
    counts = seen_keys.reshape(8, TILE, 12, TILE).sum((1, 3))
    visible, wholly = counts > 0, counts == TILE * TILE
    of_rows = sweeps_of_rows(runs.start, runs.end)
    of_keys = sweeps_of_keys(of_rows, 12)
    for sweeps, seen, whole in ((of_rows, visible, wholly), (of_keys, visible.T, wholly.T)):
        assert (np.diff(sweeps, axis=1) >= 0).all()
        assert (covered(sweeps, seen.shape[1], whole=False) >= seen).all()
        assert (covered(sweeps, seen.shape[1], whole=True) <= whole).all()
    if len(lengths) == 1 and window != 1:
        assert np.array_equal(covered(of_rows, 12, whole=True), wholly)  # no full tile is masked
        assert covered(of_rows, 12, whole=False).sum() == visible.sum()
