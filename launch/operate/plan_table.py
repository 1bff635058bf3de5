"""The batches of an epoch as a table: printed at the start of every run, and by `python -m launch.bench plan`."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.config import PlanConfig
from common.data.arrow_file import Int32Array
from common.data.padding import padded_lengths
from services.exchange.plan import Plan
from services.exchange.samples import Samples


class BucketFigures(NamedTuple):
    """One length bucket of the first epoch."""

    longest: int  # tokens
    num_samples: int
    num_batches: int
    smallest: int  # samples of a batch
    largest: int


class PlanFigures(NamedTuple):
    """The first epoch; every epoch has as many batches of the same sizes."""

    num_samples: int
    num_left_out: int
    num_batches: int
    smallest: int
    largest: int
    num_tokens: int
    num_padded_tokens: int  # every row as long as common.data.padding makes the longest of its batch
    buckets: list[BucketFigures]

    @property
    def padding_share(self) -> float:
        """Of the tokens that the target computes."""
        return 1 - self.num_tokens / self.num_padded_tokens


def measure_plan(plan: Plan, lengths: Int32Array, settings: PlanConfig) -> PlanFigures:
    """Count the first epoch of a plan made of these lengths."""
    batches = plan.epoch(0)
    sizes = np.array([len(ids) for ids in batches])
    longest = np.maximum.reduceat(lengths[np.concatenate(batches)], np.cumsum(sizes) - sizes).astype(np.int64)
    bucket_of = np.searchsorted(settings.bucket_lengths, longest)
    buckets = [_measure_bucket(bound, sizes[bucket_of == bucket]) for bucket, bound in enumerate(settings.bucket_lengths)]
    return PlanFigures(
        num_samples=int(sizes.sum()),
        num_left_out=int((lengths == 0).sum()),
        num_batches=len(batches),
        smallest=int(sizes.min()),
        largest=int(sizes.max()),
        num_tokens=int(lengths.sum()),
        num_padded_tokens=int((sizes * padded_lengths(longest, settings.bucket_lengths)).sum()),
        buckets=buckets,
    )


def format_plan(plan: Plan, samples: Samples, held_out: Samples, settings: PlanConfig) -> str:
    """The table that users know: samples, batches, shares; padding and supervised tokens below."""
    figures = measure_plan(plan, samples.lengths, settings)
    left_out = f" ({figures.num_left_out:,} empty left out)" if figures.num_left_out else ""
    supervised = samples.num_supervised_tokens
    lines = [
        ("samples", f"{figures.num_samples:,}{left_out}; {len(held_out.lengths):,} held out"),
        ("batches per epoch", f"{figures.num_batches:,} of {_sizes(figures)} samples"),
        ("steps", f"{plan.num_steps:,}: {settings.epochs} epochs, {settings.batches_per_step} batches a step"),
        ("tokens per epoch", f"{figures.num_tokens:,}"),
        ("supervised", "not counted" if supervised is None else f"{supervised:,} ({supervised / figures.num_tokens:.1%})"),
        ("padding", f"{figures.padding_share:.2%} of what the target computes"),
    ]
    rows = [f"{name:<18} {value}" for name, value in lines]
    rows.append(f"{'bucket':>14} {'samples':>11} {'batches':>9} {'share':>7} {'min':>4} {'max':>4} {'avg':>6}")
    shortest = 1
    for bucket in figures.buckets:
        rows.append(_format_bucket(bucket, shortest, figures.num_batches))
        shortest = bucket.longest + 1
    return "\n".join(rows)


def _measure_bucket(bound: int, sizes: NDArray[np.int64]) -> BucketFigures:
    return BucketFigures(bound, int(sizes.sum()), len(sizes), int(sizes.min(initial=bound)), int(sizes.max(initial=0)))


def _sizes(figures: PlanFigures) -> str:
    return f"{figures.smallest} to {figures.largest}, on average {figures.num_samples / figures.num_batches:.1f},"


def _format_bucket(bucket: BucketFigures, shortest: int, num_batches: int) -> str:
    share = f"{bucket.num_batches / num_batches:.1%}"
    start = f"{f'{shortest}-{bucket.longest}':>14} {bucket.num_samples:>11,} {bucket.num_batches:>9,} {share:>7}"
    if not bucket.num_batches:
        return start
    return f"{start} {bucket.smallest:>4} {bucket.largest:>4} {bucket.num_samples / bucket.num_batches:>6.1f}"
