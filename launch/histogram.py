"""How long the samples of a data set are, and how much of them is supervised, as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from common.data.dataset import Dataset

MAX_SAMPLES = 10_000  # whose masks are read
_NUM_BINS = 60


def draw_histogram(dataset: Dataset, path: Path) -> None:
    """Write a PNG: tokens per sample of all samples; supervised tokens of evenly spaced ones. DataError as `read`."""
    lengths = dataset.lengths
    rows = np.unique(np.linspace(0, dataset.num_samples - 1, min(MAX_SAMPLES, dataset.num_samples)).astype(int))
    supervised = np.array([dataset.read(int(row)).loss_mask.sum() for row in rows])
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.hist(lengths, bins=_NUM_BINS)
    left.set(title=f"{len(lengths):,} samples, {int(lengths.sum()):,} tokens", xlabel="tokens", ylabel="samples")
    right.hist(supervised, bins=_NUM_BINS, color="tab:green")
    right.set(title=f"supervised, of {len(rows):,} samples", xlabel="supervised tokens", ylabel="samples")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)
