"""What measurements of whole runs are made of: a model's shape with random weights, and rows as long as real ones.

The lengths fill the six buckets so that each makes up that share of the batches which it has in the reference run
(see launch.bench.plan); tokens are random, and the first quarter of a row is its prompt.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from common.config import Config, load
from common.data.writer import DatasetWriter
from launch.bench.plan import draw_lengths
from services.exchange.samples import read_run_data

SHAPES = ("qwen3_6_27b", "qwen3_8b", "tiny")
_CONFIGS = Path(__file__).parents[2] / "configs"
_EPOCHS = 50  # more than any measurement lasts
_NEVER = 10**6


class Workload(NamedTuple):
    """A configuration file and what is set beside it: the command line of a run."""

    path: Path
    overrides: list[str]

    @classmethod
    def make(
        cls, shape: str, folder: Path, devices: tuple[list[str], list[str]], num_samples: int, settings: Sequence[str]
    ) -> "Workload":
        """The run of `shape` without end, without checkpoints and without an evaluation; its rows are written here.

        Args:
            shape: one of SHAPES.
            folder: where the data set is made.
            devices: of the targets and of the drafters.
            num_samples: rows of the data set.
            settings: further `key=value` ones, which win.
        """
        data = folder / "rows"
        overrides = [
            f"model.path={_CONFIGS / f'{shape}_target'}",
            "model.random_init=true",
            f'data={{path="{data}"}}',
            f"targets.devices={_toml(devices[0])}",
            f"drafters.devices={_toml(devices[1])}",
            f"plan.batches_per_step={2 * len(devices[1])}",
            f"plan.epochs={_EPOCHS}",
            f"checkpoint.every_steps={_NEVER}",
            *settings,
        ]
        workload = cls(_CONFIGS / f"{shape}.toml", overrides)
        write_rows(data, workload.config, num_samples)
        return workload

    def with_settings(self, settings: Sequence[str]) -> "Workload":
        """The same with these set, too."""
        return self._replace(overrides=[*self.overrides, *settings])

    @property
    def config(self) -> Config:
        """As the run will have it."""
        return load(self.path, self.overrides)


def write_rows(folder: Path, config: Config, num_samples: int) -> None:
    """Write the data set."""
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
        """Of one batch of the sequence."""
        return int(self._lengths[self._plan.sample_ids(batch)].sum())

    def of_steps(self, first: int, last: int) -> int:
        """Of the optimizer steps `first` to `last`, counted from 1; of runs without an evaluation."""
        size = self._batches_per_step
        return sum(self.of_batch(batch) for batch in range((first - 1) * size, last * size))


def _toml(texts: list[str]) -> str:
    return "[" + ", ".join(f'"{text}"' for text in texts) + "]"
