"""Damaged files: named with their rows, never read as something else."""

from pathlib import Path

import numpy as np
import pytest

from common.data.dataset import Dataset
from common.errors import DataError
from launch.data.damage import find_damage
from launch.data.writer import DatasetWriter

NUM_ROWS = 12
ROWS_PER_FILE = 5  # files of 5, 5 and 2 rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with DatasetWriter(tmp_path / "set", {}, ROWS_PER_FILE) as writer:
        for row in range(NUM_ROWS):
            writer.add(np.arange(row + 1) + 1000 * row, np.arange(row + 1) % 2)
    return tmp_path / "set"


def flip(path: Path, offset: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1 << bit
    path.write_bytes(bytes(content))


def offset_of(path: Path, token: int) -> int:
    """Return the offset of a token id in the file; each id stands there once."""
    content = path.read_bytes()
    assert content.count(np.int32(token).tobytes()) == 1
    return content.index(np.int32(token).tobytes())


def read_all(folder: Path) -> list[tuple[list[int], list[bool]]]:
    dataset = Dataset.open(folder)
    assert dataset.lengths.tolist() == list(range(1, NUM_ROWS + 1))
    samples = [dataset.read(row) for row in range(NUM_ROWS)]
    return [(sample.input_ids.tolist(), sample.loss_mask.tolist()) for sample in samples]


def test_an_intact_set_has_no_damage(folder: Path) -> None:
    assert find_damage(Dataset.open(folder, damaged=True)) == []


def test_a_flipped_byte_is_found_by_its_row_when_it_is_read_and_before(folder: Path) -> None:
    path = folder / "data-00001.arrow"
    flip(path, offset_of(path, 7003))
    dataset = Dataset.open(folder)
    dataset.read(6)
    with pytest.raises(DataError, match=r"data-00001\.arrow \(rows 5 to 9\): sample 7: its checksum is wrong"):
        dataset.read(7)
    [damage] = find_damage(Dataset.open(folder, damaged=True))
    assert (damage.file, damage.rows) == ("data-00001.arrow", [(7, 8)])
    assert "needed SHA-256" in str(damage) and str(damage).endswith("unusable rows: 7 to 7")


@pytest.mark.parametrize("num_bytes", [1, 400, 1_000_000])
def test_a_file_cut_short_makes_all_its_rows_unusable(folder: Path, num_bytes: int) -> None:
    path = folder / "data-00001.arrow"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-num_bytes])
    with pytest.raises(DataError, match=rf"data-00001\.arrow \(rows 5 to 9\): needed {size} bytes"):
        Dataset.open(folder)
    [damage] = find_damage(Dataset.open(folder, damaged=True))
    assert (damage.file, damage.rows) == ("data-00001.arrow", [(5, 10)])


def test_a_missing_file_makes_all_its_rows_unusable(folder: Path) -> None:
    (folder / "data-00002.arrow").unlink()
    assert [damage.rows for damage in find_damage(Dataset.open(folder, damaged=True))] == [[(10, 12)]]


def test_no_flipped_bit_is_read_as_something_else(folder: Path) -> None:
    """One bit of every second byte of a file in turn, metadata and offsets too: an error, or what was written."""
    path = folder / "data-00001.arrow"
    content = path.read_bytes()
    written = read_all(folder)
    num_noticed = 0
    for offset in range(0, len(content), 2):
        flip(path, offset, bit=offset // 2 % 8)
        try:
            assert read_all(folder) == written, offset
        except DataError as error:
            num_noticed += 1
            assert "data-00001.arrow" in str(error) and "(rows 5 to 9)" in str(error)
        path.write_bytes(content)
    assert num_noticed > 200
