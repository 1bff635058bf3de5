"""Folders of Hugging Face `datasets`, written here by hand as `save_to_disk` lays them out."""

from pathlib import Path

import pyarrow as pa
import pytest

from common.data.dataset import Dataset
from common.errors import DataError
from tests.builders.saved_sets import Row, save_set

ROWS: list[Row] = [([5, 6, 7], [0, 1, 1]), ([8], [1]), ([1, 2, 3, 4], [0, 0, 1, 1]), ([9, 9], [1, 0])]


def save(folder: Path, ids: pa.DataType, mask: pa.DataType, **state: object) -> Path:
    return save_set(folder, ROWS, ids, mask, **state)


@pytest.mark.parametrize(
    ("ids", "mask"),
    [
        (pa.list_(pa.int32()), pa.list_(pa.int8())),
        (pa.list_(pa.int64()), pa.list_(pa.int64())),
        (pa.large_list(pa.int64()), pa.list_(pa.bool_())),
    ],
)
def test_every_row_is_read_as_it_is(tmp_path: Path, ids: pa.DataType, mask: pa.DataType) -> None:
    dataset = Dataset.open(save(tmp_path / "set", ids, mask))
    assert dataset.lengths.tolist() == [3, 1, 4, 2]
    samples = [dataset.read(row) for row in range(dataset.num_samples)]
    assert [(sample.input_ids.tolist(), [int(bit) for bit in sample.loss_mask]) for sample in samples] == ROWS
    manifest = dataset.manifest
    assert (manifest.num_tokens, manifest.max_length, manifest.num_supervised_tokens) == (10, 4, None)


@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.int64()), pa.list_(pa.uint16()), pa.list_(pa.int8())])
@pytest.mark.parametrize("row", range(5))
def test_the_first_id_outside_a_vocabulary_is_found_in_its_row(tmp_path: Path, kind: pa.DataType, row: int) -> None:
    ids = [[1, 2, 3], [4], [5, 6], [7, 0], [3, 1]]
    ids[row][-1] = 64
    save_set(tmp_path / "set", [(tokens, [0] * len(tokens)) for tokens in ids], kind)
    dataset = Dataset.open(tmp_path / "set")
    assert dataset.find_id_outside(64) == (row, 64)
    assert dataset.find_id_outside(65) is None


@pytest.mark.parametrize("mask", [pa.list_(pa.bool_()), pa.large_list(pa.int64()), pa.list_(pa.uint8())])
@pytest.mark.parametrize("index", [None, 0, 2, 3])
def test_one_supervised_token_is_enough(tmp_path: Path, mask: pa.DataType, index: int | None) -> None:
    rows: list[Row] = [([1, 2], [0, int(row == index)]) for row in range(4)]
    assert Dataset.open(save_set(tmp_path / "set", rows, mask=mask)).has_supervised_token() is (index is not None)


def test_the_fingerprint_follows_the_librarys(tmp_path: Path) -> None:
    kinds = pa.list_(pa.int32()), pa.list_(pa.int8())
    names = [Dataset.open(save(tmp_path / name, *kinds, _fingerprint=name[0])).fingerprint for name in ("a1", "a2", "b")]
    assert names[0] == names[1] != names[2]


def test_a_stream_cut_short_is_named(tmp_path: Path) -> None:
    """Also where it is cut between two record batches, so that what is left reads well."""
    folder = save(tmp_path / "set", pa.list_(pa.int32()), pa.list_(pa.int8()))
    path = folder / "data-00001-of-00002.arrow"
    content = path.read_bytes()
    for num_bytes in (8, 9, len(content) // 2, len(content)):
        path.write_bytes(content[:-num_bytes])
        for damaged in (False, True):
            with pytest.raises(DataError, match=r"data-00001-of-00002\.arrow: needed an Arrow IPC file"):
                Dataset.open(folder, damaged=damaged)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (pa.list_(pa.int32()), pa.list_(pa.float32()), "needed the columns input_ids and loss_mask, .* found text string, "),
        (pa.list_(pa.string()), pa.list_(pa.int8()), "needed the columns input_ids and loss_mask"),
    ],
)
def test_other_columns_are_named(tmp_path: Path, ids: pa.DataType, mask: pa.DataType, message: str) -> None:
    schema = pa.schema([("text", pa.string()), ("input_ids", ids), ("loss_mask", mask)])
    folder = save(tmp_path / "set", pa.list_(pa.int32()), pa.list_(pa.int8()))
    with pa.OSFile(str(folder / "data-00000-of-00002.arrow"), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([], schema=schema))
    with pytest.raises(DataError, match=message):
        Dataset.open(folder)


def test_a_dictionary_of_sets_names_its_splits(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save(tmp_path / "set" / split, pa.list_(pa.int32()), pa.list_(pa.int8()))
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match="needed one data set, found the splits test, train"):
        Dataset.open(tmp_path / "set")
    assert Dataset.open(tmp_path / "set" / "train").num_samples == 4


@pytest.mark.parametrize("state", [{"_data_files": [{}]}, {"_indices_data_files": [{"filename": "indices.arrow"}]}])
def test_a_state_that_cannot_be_followed_is_named(tmp_path: Path, state: dict[str, object]) -> None:
    folder = save(tmp_path / "set", pa.list_(pa.int32()), pa.list_(pa.int8()), **state)
    with pytest.raises(DataError, match=r"state\.json: needed"):
        Dataset.open(folder)
