"""The run that a measurement makes: a model's shape with random weights, and rows with lengths of the reference run.

The lengths fill the buckets so that each has its share of the reference run's batches (see launch.bench.plan); tokens are
random, and the first quarter of a row is its prompt.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from common.config import Config, load
from launch.bench.plan import draw_lengths
from launch.bench.shapes import SHAPES as GPU_SHAPES
from launch.bench.shapes import config_path, random_target
from launch.data.writer import DatasetWriter
from services.exchange.samples import read_run_data

SHAPES = (*GPU_SHAPES, "tiny")
_EPOCHS = 50  # more than any measurement lasts
_NEVER = 10**6


class Workload(NamedTuple):
    """A configuration file and the settings beside it: the command line of a run."""

    path: Path
    overrides: list[str]

    @classmethod
    def make(
        cls, shape: str, folder: Path, devices: tuple[list[str], list[str]], num_samples: int, settings: Sequence[str]
    ) -> "Workload":
        """Make a run of `shape` without end, without checkpoints and without an evaluation, and write its data set.

        Args:
            shape: one of SHAPES.
            folder: the data set is made in it.
            devices: of the targets and of the drafters.
            num_samples: rows of the data set.
            settings: further `key=value` ones, which win.
        """
        targets, drafters = (msgspec.json.encode(names).decode() for names in devices)
        overrides = [
            *random_target(shape),
            f'data={{path="{folder / "rows"}"}}',
            f"targets.devices={targets}",
            f"drafters.devices={drafters}",
            f"plan.batches_per_step={2 * len(devices[1])}",
            f"plan.epochs={_EPOCHS}",
            f"checkpoint.every_steps={_NEVER}",
            *settings,
        ]
        workload = cls(config_path(shape), overrides)
        _write_rows(folder / "rows", workload.config, num_samples)
        return workload

    @property
    def config(self) -> Config:
        return load(self.path, self.overrides)


def _write_rows(folder: Path, config: Config, num_samples: int) -> None:
    random = np.random.Generator(np.random.Philox(config.seed))
    ids = np.delete(np.arange(config.shape.vocab_size, dtype=np.int32), config.draft.mask_token_id)
    with DatasetWriter(folder, {"made_by": "launch.bench.harness.workload", "seed": config.seed}) as writer:
        for length in draw_lengths(num_samples, config.seed, config.plan):
            writer.add(random.choice(ids, length), np.arange(length) >= length // 4)


class TokenCounts:
    """Tokens of the batches of a run, from its plan."""

    def __init__(self, config: Config) -> None:
        data = read_run_data(config.data)
        self._lengths = data.train.lengths
        self._plan, _ = data.plan(config)
        self._batches_per_step = config.plan.batches_per_step

    def of_batch(self, batch: int) -> int:
        return int(self._lengths[self._plan.sample_ids(batch)].sum())

    def of_steps(self, first: int, last: int) -> int:
        """Count the optimizer steps `first` to `last`, numbered from 1, of a run without an evaluation."""
        size = self._batches_per_step
        return sum(self.of_batch(batch) for batch in range((first - 1) * size, last * size))
