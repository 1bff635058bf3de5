"""Samples of a run: lengths and fingerprints of its data sets."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.config import Config, DataConfig
from common.data.dataset import Dataset
from common.errors import DataError
from launch.data.writer import DatasetWriter
from services.exchange.samples import read_run_data
from tests.builders.small_runs import make_config


def write_set(folder: Path, lengths: list[int]) -> str:
    with DatasetWriter(folder, {}, rows_per_file=2) as writer:
        for length in lengths:
            writer.add(np.arange(length), np.ones(length))
    return str(folder)


def with_data(**data: object) -> Config:
    return msgspec.structs.replace(make_config(buckets=(8,), samples=2), data=msgspec.convert(data, DataConfig))


def test_lengths_and_names_are_those_of_the_sets(tmp_path: Path) -> None:
    train, held_out = write_set(tmp_path / "train", [3, 8, 5]), write_set(tmp_path / "eval", [4])
    data = read_run_data(DataConfig(path=train, eval_path=held_out))
    assert (data.train.lengths.tolist(), data.held_out.lengths.tolist()) == ([3, 8, 5], [4])
    assert data.train.fingerprint == Dataset.open(tmp_path / "train").fingerprint
    assert data.train.num_supervised_tokens == 16


def test_without_a_held_out_set_there_are_no_evaluations(tmp_path: Path) -> None:
    config = with_data(path=write_set(tmp_path / "train", [3, 8, 5]))
    plan, _ = read_run_data(config.data).plan(config)
    assert [plan.info(batch).kind for batch in range(plan.num_batches)] == ["train"] * 2


def test_several_held_out_sets_run_on_from_each_other(tmp_path: Path) -> None:
    train = write_set(tmp_path / "train", [3, 8, 5])
    first, second = write_set(tmp_path / "a", [4, 2]), write_set(tmp_path / "b", [7])
    config = with_data(path=train, eval_paths={"first": first, "second": second})
    data = read_run_data(config.data)
    assert data.held_out.lengths.tolist() == [4, 2, 7]
    assert data.held_out.num_supervised_tokens == 13
    other_order = with_data(path=train, eval_paths={"second": second, "first": first})
    renamed = with_data(path=train, eval_paths={"one": first, "two": second})
    names = [read_run_data(each.data).plan(each)[1] for each in (config, other_order, renamed)]
    assert names[0] == names[2] != names[1]  # what is in the batches counts, not what it is called


def test_a_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    path = write_set(tmp_path / "train", [3, 8, 5, 2, 6])
    (tmp_path / "train" / "data-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001\.arrow \(rows 2 to 3\): needed a file"):
        read_run_data(DataConfig(path=path))
