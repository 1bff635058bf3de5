"""The batches of an epoch as a table: printed at the start of every run, and by `python -m launch.bench plan`."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from common.config import PlanConfig
from common.data.padding import padded_lengths
from services.exchange.plan import Plan
from services.exchange.samples import Samples


def format_plan(plan: Plan, samples: Samples, held_out: Samples, settings: PlanConfig) -> str:
    """Format the first epoch, in total and by bucket; every epoch has as many batches of the same sizes."""
    batches, lengths, buckets = plan.epoch(0), samples.lengths, settings.bucket_lengths
    sizes = np.array([len(ids) for ids in batches])
    longest = np.maximum.reduceat(lengths[np.concatenate(batches)], np.cumsum(sizes) - sizes).astype(np.int64)
    num_tokens, num_left_out = int(lengths.sum()), int((lengths == 0).sum())
    padding = 1 - num_tokens / int((sizes * padded_lengths(longest, buckets)).sum())
    left_out = f" ({num_left_out:,} empty left out)" if num_left_out else ""
    supervised = samples.num_supervised_tokens
    lines = {
        "samples": f"{sizes.sum():,}{left_out}; {len(held_out.lengths):,} held out",
        "batches per epoch": f"{len(sizes):,} of {sizes.min()} to {sizes.max()}, on average {sizes.mean():.1f}, samples",
        "steps": f"{plan.num_steps:,}: {settings.epochs} epochs, {settings.batches_per_step} batches a step",
        "tokens per epoch": f"{num_tokens:,}",
        "supervised": "not counted" if supervised is None else f"{supervised:,} ({supervised / num_tokens:.1%})",
        "padding": f"{padding:.2%} of what the target computes",
    }
    header = f"{'bucket':>14} {'samples':>11} {'batches':>9} {'share':>7} {'min':>4} {'max':>4} {'avg':>6}"
    return "\n".join([*(f"{name:<18} {value}" for name, value in lines.items()), header, *_buckets(sizes, longest, buckets)])


def _buckets(sizes: NDArray[np.int64], longest: NDArray[np.int64], bounds: list[int]) -> Iterator[str]:
    """Yield a line for every bucket.

    Args:
        sizes: int64 [batches], samples of a batch.
        longest: int64 [batches], tokens of its longest sample.
        bounds: of the buckets, in tokens.
    """
    bucket_of = np.searchsorted(bounds, longest)
    for bucket, (shortest, bound) in enumerate(zip([1, *(bound + 1 for bound in bounds)], bounds, strict=False)):
        found = sizes[bucket_of == bucket]
        line = f"{f'{shortest}-{bound}':>14} {found.sum():>11,} {len(found):>9,} {f'{len(found) / len(sizes):.1%}':>7}"
        yield line + (f" {found.min():>4} {found.max():>4} {found.mean():>6.1f}" if len(found) else "")
