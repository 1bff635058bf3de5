"""From samples to padded rows, and from padded taps to the packed features of a slot."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.data.dataset import Dataset
from launch.data.writer import DatasetWriter
from services.target.rows import read_rows

LENGTHS = [5, 2, 7]


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    with DatasetWriter(tmp_path / "set", {}) as writer:
        for number, length in enumerate(LENGTHS):
            writer.add(np.arange(length) + 10 * (number + 1), np.arange(length) % 2)
    return Dataset.open(tmp_path / "set")


def test_rows_are_padded_on_the_right_and_packed_in_the_order_of_the_batch(dataset: Dataset) -> None:
    rows = read_rows(dataset, [2, 0, 1], [7])
    assert rows.input_ids.dtype == torch.int64
    assert rows.input_ids.tolist() == [
        [30, 31, 32, 33, 34, 35, 36],
        [10, 11, 12, 13, 14, 0, 0],
        [20, 21, 0, 0, 0, 0, 0],
    ]
    assert rows.token_index.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 14, 15]
    packed = rows.packed
    assert packed.input_ids.tolist() == [30, 31, 32, 33, 34, 35, 36, 10, 11, 12, 13, 14, 20, 21]
    assert packed.loss_mask.tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 7, 12, 14]
    assert packed.sample_ids.tolist() == [2, 0, 1]


def test_padded_and_packed_ids_are_the_same_tokens(dataset: Dataset) -> None:
    rows = read_rows(dataset, [1, 2], [4, 16])
    assert rows.input_ids.shape == (2, 8)
    assert np.array_equal(rows.input_ids.numpy().ravel()[rows.token_index], rows.packed.input_ids)
