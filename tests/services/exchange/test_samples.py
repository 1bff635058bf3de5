"""What a plan is made of, with and without damage."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from common.config import Config, DataConfig
from common.data.damage import DamagedRows, write_damaged_rows
from common.data.dataset import Dataset, DatasetWriter
from common.errors import DataError
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
    data = read_run_data(with_data(path=train, eval_path=held_out), tmp_path)
    assert (data.train.lengths.tolist(), data.held_out.lengths.tolist()) == ([3, 8, 5], [4])
    assert data.train.fingerprint == Dataset.open(tmp_path / "train").fingerprint
    assert data.train.num_supervised_tokens == 16


def test_without_a_held_out_set_there_are_no_evaluations(tmp_path: Path) -> None:
    config = with_data(path=write_set(tmp_path / "train", [3, 8, 5]))
    plan, _ = read_run_data(config, tmp_path).plan(config)
    assert [plan.info(place).kind for place in range(plan.num_batches)] == ["train"] * 2


def test_several_held_out_sets_run_on_from_each_other(tmp_path: Path) -> None:
    train = write_set(tmp_path / "train", [3, 8, 5])
    first, second = write_set(tmp_path / "a", [4, 2]), write_set(tmp_path / "b", [7])
    config = with_data(path=train, eval_paths={"first": first, "second": second})
    data = read_run_data(config, tmp_path)
    assert data.held_out.lengths.tolist() == [4, 2, 7]
    assert data.held_out.num_supervised_tokens == 13
    other_order = with_data(path=train, eval_paths={"second": second, "first": first})
    renamed = with_data(path=train, eval_paths={"one": first, "two": second})
    names = [read_run_data(each, tmp_path).plan(each)[1] for each in (config, other_order, renamed)]
    assert names[0] == names[2] != names[1]  # what is in the batches counts, not what it is called
    damaged = msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, skip_damaged=True))
    write_damaged_rows(DamagedRows(held_out={"second": [], "first": [(1, 2)]}), tmp_path)
    assert read_run_data(damaged, tmp_path).held_out.lengths.tolist() == [4, 0, 7]


def test_damaged_rows_are_in_no_batch_and_the_plan_has_another_name(tmp_path: Path) -> None:
    config = with_data(path=write_set(tmp_path / "train", [3, 8, 5, 2, 6]), skip_damaged=True)
    hashes = set()
    for rows, left in (([], [0, 1, 2, 3, 4]), ([(1, 2)], [0, 2, 3, 4]), ([(1, 2), (4, 5)], [0, 2, 3])):
        write_damaged_rows(DamagedRows(train=rows), tmp_path)
        plan, name = read_run_data(config, tmp_path).plan(config)
        assert sorted(np.concatenate(plan.epoch(0)).tolist()) == left
        assert read_run_data(config, tmp_path).plan(config)[1] == name
        hashes.add(name)
    assert len(hashes) == 3
    intact = with_data(path=config.data.path)
    assert read_run_data(intact, tmp_path).plan(intact)[1] in hashes  # nothing left out is nothing changed


def test_a_file_that_is_gone_is_an_error_unless_its_rows_are_left_out(tmp_path: Path) -> None:
    path = write_set(tmp_path / "train", [3, 8, 5, 2, 6])
    (tmp_path / "train" / "data-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001\.arrow \(rows 2 to 3\): needed a file"):
        read_run_data(with_data(path=path), tmp_path)
    write_damaged_rows(DamagedRows(train=[(2, 4)]), tmp_path)
    assert read_run_data(with_data(path=path, skip_damaged=True), tmp_path).train.lengths.tolist() == [3, 8, 0, 0, 6]
