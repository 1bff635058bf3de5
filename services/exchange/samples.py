"""What a plan is made of: the lengths of the samples, and a name for what is in them."""

import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config import Config
from common.data.arrow_file import Int32Array
from common.data.damage import DamagedRows, Ranges, read_damaged_rows, usable_fingerprint, usable_lengths
from common.data.dataset import Dataset
from services.exchange.plan import Plan, plan_hash


class Samples(NamedTuple):
    """One data set as the plan sees it."""

    lengths: Int32Array  # [num_samples]; 0: never used
    fingerprint: str
    num_supervised_tokens: int | None = 0


class RunData(NamedTuple):
    """What is trained on, and all evaluation sets as one (see common/data/held_out.py); empty where nothing is held out."""

    train: Samples
    held_out: Samples

    def plan(self, config: Config) -> tuple[Plan, bytes]:
        """The sequence of the run, and the hash that names it."""
        plan = Plan(config, self.train.lengths, self.held_out.lengths)
        return plan, plan_hash(config, self.train.fingerprint, self.held_out.fingerprint)


def read_run_data(config: Config, run_dir: Path) -> RunData:
    """Read the lengths; with `data.skip_damaged` without the rows that start_all found unusable.

    Raises:
        DataError: a data set is missing or damaged.
    """
    data = config.data
    damaged = read_damaged_rows(run_dir) if data.skip_damaged else DamagedRows()
    train = _read(data.path, damaged.train, data.skip_damaged)
    sets = [_read(path, damaged.held_out.get(name, []), data.skip_damaged) for name, path in data.eval_sets.items()]
    return RunData(train, _join(sets))


def _read(path: str, damaged: Ranges, skip_damaged: bool) -> Samples:
    dataset = Dataset.open(Path(path), damaged=skip_damaged)
    num_supervised_tokens = None if damaged else dataset.manifest.num_supervised_tokens
    return Samples(usable_lengths(dataset, damaged), usable_fingerprint(dataset, damaged), num_supervised_tokens)


def _join(sets: list[Samples]) -> Samples:
    """One set is itself; several run on from each other."""
    if len(sets) == 1:
        return sets[0]
    counts = [samples.num_supervised_tokens for samples in sets]
    return Samples(
        np.concatenate([np.zeros(0, np.int32), *(samples.lengths for samples in sets)]),
        hashlib.sha256("\n".join(samples.fingerprint for samples in sets).encode()).hexdigest() if sets else "",
        sum(count for count in counts if count is not None) if None not in counts else None,
    )
