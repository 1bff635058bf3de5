"""What a plan is made of: the lengths of both data sets, and a name for what is in them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.arrow_file import Int32Array
from common.config import Config
from common.damage import DamagedRows, Ranges, read_damaged_rows, usable_fingerprint, usable_lengths
from common.dataset import Dataset
from services.exchange.plan import Plan, plan_hash


class Samples(NamedTuple):
    """One data set as the plan sees it."""

    lengths: Int32Array  # [num_samples]; 0: never used
    fingerprint: str
    num_supervised_tokens: int | None = 0


class RunData(NamedTuple):
    """Both data sets of a run; the second is empty where nothing is held out."""

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
    damaged = read_damaged_rows(run_dir) if config.data.skip_damaged else DamagedRows()
    train = _read(config.data.path, damaged.train, config.data.skip_damaged)
    if not config.data.eval_path:
        return RunData(train, Samples(np.zeros(0, np.int32), ""))
    return RunData(train, _read(config.data.eval_path, damaged.eval, config.data.skip_damaged))


def _read(path: str, damaged: Ranges, skip_damaged: bool) -> Samples:
    dataset = Dataset.open(Path(path), damaged=skip_damaged)
    num_supervised_tokens = None if damaged else dataset.manifest.num_supervised_tokens
    return Samples(usable_lengths(dataset, damaged), usable_fingerprint(dataset, damaged), num_supervised_tokens)
