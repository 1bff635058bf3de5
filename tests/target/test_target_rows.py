"""From samples to padded rows, and from padded taps to the packed features of a slot."""

from pathlib import Path

import numpy as np
import pytest
import torch

from common.checksum import checksum
from common.dataset import Dataset, DatasetWriter
from services.target.pack import pack
from services.target.rows import read_rows

LENGTHS = [5, 2, 7]
NUM_TOKENS = sum(LENGTHS)
NUM_TAPS = 3
HIDDEN_SIZE = 4


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    with DatasetWriter(tmp_path / "set", {}) as writer:
        for number, length in enumerate(LENGTHS):
            writer.add(np.arange(length) + 10 * (number + 1), np.arange(length) % 2)
    return Dataset.open(tmp_path / "set")


def test_rows_are_padded_on_the_right_and_packed_in_the_asked_order(dataset: Dataset) -> None:
    rows = read_rows(dataset, [2, 0, 1])
    assert rows.input_ids.dtype == torch.int64
    assert rows.input_ids.tolist() == [
        [30, 31, 32, 33, 34, 35, 36],
        [10, 11, 12, 13, 14, 0, 0],
        [20, 21, 0, 0, 0, 0, 0],
    ]
    assert rows.lengths == [7, 5, 2]
    packed = rows.packed
    assert packed.input_ids.tolist() == [30, 31, 32, 33, 34, 35, 36, 10, 11, 12, 13, 14, 20, 21]
    assert packed.loss_mask.tolist() == [0, 1, 0, 1, 0, 1, 0, 0, 1, 0, 1, 0, 0, 1]
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 0, 1]
    assert packed.cu_seqlens.tolist() == [0, 7, 12, 14]
    assert packed.sample_ids.tolist() == [2, 0, 1]


def test_padded_and_packed_ids_are_the_same_tokens(dataset: Dataset) -> None:
    rows = read_rows(dataset, [1, 2])
    kept = np.concatenate([row[:length] for row, length in zip(rows.input_ids.numpy(), rows.lengths, strict=True)])
    assert np.array_equal(kept, rows.packed.input_ids)


def make_taps() -> list[torch.Tensor]:
    """Every element tells its tap, row, place and column; the padding is NaN."""
    taps = []
    for tap in range(NUM_TAPS):
        rows = torch.full((len(LENGTHS), max(LENGTHS), HIDDEN_SIZE), torch.nan)
        for row, length in enumerate(LENGTHS):
            places = torch.arange(length * HIDDEN_SIZE).view(length, HIDDEN_SIZE)
            rows[row, :length] = 1000 * tap + 100 * row + places
        taps.append(rows)
    return taps


def pack_both(taps: list[torch.Tensor], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    packed = torch.empty(NUM_TOKENS, NUM_TAPS, HIDDEN_SIZE, dtype=dtype)
    split = torch.empty(NUM_TAPS, NUM_TOKENS, HIDDEN_SIZE, dtype=dtype)
    pack(taps, LENGTHS, packed, split=False)
    pack(taps, LENGTHS, split, split=True)
    return packed, split


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_layouts_hold_the_real_rows_bit_for_bit(dtype: torch.dtype) -> None:
    taps = make_taps()
    packed, split = pack_both(taps, dtype)
    expected = [torch.cat([rows[row, :length] for row, length in enumerate(LENGTHS)]).to(dtype) for rows in taps]
    assert torch.equal(split, torch.stack(expected))
    assert torch.equal(packed, torch.stack(expected, dim=1))
    assert checksum(packed) == checksum(split)


def test_packing_takes_the_states_of_a_forward_without_gradients() -> None:
    """The taps are inference tensors; the buffer of a slot is not, and is written again and again."""
    with torch.inference_mode():
        taps = [tap * 2 for tap in make_taps()]
    packed, _ = pack_both(taps, torch.float32)
    assert not packed.isnan().any()
    assert torch.equal(packed[: LENGTHS[0], 1], make_taps()[1][0, : LENGTHS[0]] * 2)


@pytest.mark.parametrize("num_tokens", [NUM_TOKENS - 1, NUM_TOKENS + 1])
def test_a_buffer_of_another_size_is_refused(num_tokens: int) -> None:
    with pytest.raises(AssertionError):
        pack(make_taps(), LENGTHS, torch.empty(num_tokens, NUM_TAPS, HIDDEN_SIZE), split=False)
