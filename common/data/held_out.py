"""The evaluation sets of a run as one: sample ids run on from set to set, in the order of the configuration."""

import bisect
import itertools
from pathlib import Path

from common.config import DataConfig
from common.data.arrow_file import Sample
from common.data.dataset import Dataset

Group = tuple[str, str]  # set and category; "" stands for no category


class HeldOut:
    """Read access to all evaluation sets, by their names, under one numbering."""

    def __init__(self, sets: dict[str, Dataset]) -> None:
        self.sets = sets
        self._names = list(sets)
        self._ends = list(itertools.accumulate(dataset.num_samples for dataset in sets.values()))

    @classmethod
    def open(cls, data: DataConfig) -> "HeldOut":
        """Open the sets that `data` names; DataError as `Dataset.open`."""
        return cls({name: Dataset.open(Path(path).expanduser()) for name, path in data.eval_sets.items()})

    @property
    def num_samples(self) -> int:
        """Over all sets; ids run from 0."""
        return self._ends[-1] if self._ends else 0

    def locate(self, sample_id: int) -> tuple[str, int]:
        """Return the set of a sample, and its id there."""
        index = bisect.bisect_right(self._ends, sample_id)
        name = self._names[index]
        return name, sample_id - self._ends[index] + self.sets[name].num_samples

    def read(self, sample_id: int) -> Sample:
        """Return a copy of one sample; DataError as `Dataset.read`."""
        name, own_id = self.locate(sample_id)
        return self.sets[name].read(own_id)

    def groups(self) -> list[Group]:
        """Return set and category of every sample."""
        return [(name, category) for name, dataset in self.sets.items() for category in dataset.categories]
