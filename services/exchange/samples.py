"""The input of a plan: the lengths of the samples, and a fingerprint of their contents."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config import Config, DataConfig
from common.data.arrow_file import Int32Array
from common.data.dataset import Dataset
from services.exchange.plan import Plan, plan_hash


class Samples(NamedTuple):
    """One data set as the plan sees it."""

    lengths: Int32Array  # [num_samples]; 0: never used
    fingerprint: str
    num_supervised_tokens: int | None = 0


class RunData(NamedTuple):
    """The training set, and all evaluation sets as one (see common/data/held_out.py); empty if nothing is held out."""

    train: Samples
    held_out: Samples

    def plan(self, config: Config) -> tuple[Plan, bytes]:
        """Return the sequence of the run, and the hash that names it."""
        plan = Plan(config, self.train.lengths, self.held_out.lengths)
        return plan, plan_hash(config, self.train.fingerprint, self.held_out.fingerprint)


def read_run_data(data: DataConfig) -> RunData:
    """Read the lengths of all data sets of a run; DataError if one is missing or damaged."""
    return RunData(_read(data.path), _join([_read(path) for path in data.eval_sets.values()]))


def _read(path: str) -> Samples:
    dataset = Dataset.open(Path(path))
    return Samples(dataset.lengths, dataset.fingerprint, dataset.manifest.num_supervised_tokens)


def _join(sets: list[Samples]) -> Samples:
    """Number the samples of several sets one after the other; a single set keeps its fingerprint, and so the plan's hash."""
    if len(sets) == 1:
        return sets[0]
    counts = [samples.num_supervised_tokens for samples in sets]
    return Samples(
        np.concatenate([np.zeros(0, np.int32), *(samples.lengths for samples in sets)]),
        hashlib.sha256("\n".join(samples.fingerprint for samples in sets).encode()).hexdigest() if sets else "",
        sum(count for count in counts if count is not None) if None not in counts else None,
    )
