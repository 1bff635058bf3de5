"""The prepared data set: what is written is read, and nothing else is taken for one."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from common.data.arrow_file import Sample, to_batch
from common.data.dataset import Dataset
from common.errors import DataError
from launch.data.writer import ROWS_PER_BATCH, DatasetWriter


def make_samples(count: int) -> list[tuple[list[int], list[int]]]:
    random = np.random.Generator(np.random.Philox(7))
    lengths = random.integers(1, 9, count)
    return [(random.integers(0, 100, n).tolist(), random.integers(0, 2, n).tolist()) for n in lengths]


def write(folder: Path, samples: list[tuple[list[int], list[int]]], rows_per_file: int = 5) -> Dataset:
    with DatasetWriter(folder, {"made_by": "test"}, rows_per_file) as writer:
        for input_ids, loss_mask in samples:
            writer.add(input_ids, loss_mask)
    return Dataset.open(folder)


def edit_manifest(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_every_sample_is_read_as_written_over_files_and_record_batches(tmp_path: Path) -> None:
    samples = make_samples(2 * ROWS_PER_BATCH + 300)
    dataset = write(tmp_path / "set", samples, rows_per_file=ROWS_PER_BATCH + 100)
    assert len(list((tmp_path / "set").glob("*.arrow"))) == 3
    assert dataset.num_samples == len(samples)
    for sample_id, (input_ids, loss_mask) in enumerate(samples):
        sample = dataset.read(sample_id)
        assert sample.input_ids.dtype == np.int32
        assert sample.loss_mask.dtype == np.bool_
        assert (sample.input_ids.tolist(), sample.loss_mask.tolist()) == (input_ids, [bool(bit) for bit in loss_mask])
    assert dataset.lengths.dtype == np.int32
    assert dataset.lengths.tolist() == [len(input_ids) for input_ids, _ in samples]


def test_the_manifest_counts(tmp_path: Path) -> None:
    manifest = write(tmp_path / "set", [([1, 2, 3], [0, 1, 1]), ([4], [1])]).manifest
    assert (manifest.num_samples, manifest.num_tokens, manifest.num_supervised_tokens, manifest.max_length) == (2, 4, 3, 3)
    assert manifest.source == {"made_by": "test"}


def test_the_fingerprint_is_of_the_content_not_of_the_files(tmp_path: Path) -> None:
    samples = make_samples(12)
    fingerprint = write(tmp_path / "a", samples, rows_per_file=5).fingerprint
    assert write(tmp_path / "b", samples, rows_per_file=12).fingerprint == fingerprint
    input_ids, loss_mask = samples[3]
    changed = [*samples[:3], (input_ids, [1 - loss_mask[0], *loss_mask[1:]]), *samples[4:]]
    assert write(tmp_path / "c", changed).fingerprint != fingerprint
    moved = [([1, 2], [0, 0]), ([3], [0])]
    assert write(tmp_path / "d", moved).fingerprint != write(tmp_path / "e", [([1], [0]), ([2, 3], [0, 0])]).fingerprint


def test_a_sample_is_a_copy_that_may_be_written(tmp_path: Path) -> None:
    dataset = write(tmp_path / "set", [([1, 2], [0, 1])])
    dataset.read(0).input_ids[:] = 9
    assert dataset.read(0).input_ids.tolist() == [1, 2]


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), DatasetWriter(tmp_path / "set", {}, rows_per_file=1) as writer:
        writer.add([1], [1])
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_nothing_stands_under_the_name_before_the_end(tmp_path: Path) -> None:
    with DatasetWriter(tmp_path / "set", {}, rows_per_file=1) as writer:
        writer.add([1], [1])
        assert not (tmp_path / "set").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_writer_needs_a_new_folder(tmp_path: Path) -> None:
    write(tmp_path / "set", [([1], [1])])
    with pytest.raises(DataError, match=r"set: needed a new folder, found one that exists"):
        DatasetWriter(tmp_path / "set", {})


@pytest.mark.parametrize(
    ("input_ids", "loss_mask", "message"),
    [
        ([], [], r"sample 1: needed at least one token, found none"),
        ([1, 2], [1], r"sample 1: needed input_ids and loss_mask \[n\], found \(2,\) and \(1,\)"),
        ([[1, 2]], [[1, 1]], r"sample 1: needed input_ids and loss_mask \[n\], found \(1, 2\) and \(1, 2\)"),
        ([1, -1], [1, 1], r"sample 1: needed token ids from 0, found -1"),
    ],
)
def test_a_writer_refuses_malformed_samples(tmp_path: Path, input_ids: object, loss_mask: object, message: str) -> None:
    with pytest.raises(DataError, match=message), DatasetWriter(tmp_path / "set", {}) as writer:
        writer.add([1], [1])
        writer.add(input_ids, loss_mask)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_writer_without_samples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needed at least one sample to write, found none"), DatasetWriter(tmp_path / "set", {}):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent: needed a prepared data set, found no such folder"):
        Dataset.open(tmp_path / "absent")


def test_a_folder_without_a_manifest_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"needed manifest\.json, found none"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"schema_version": 1}'])
def test_a_damaged_manifest_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(DataError, match=r"manifest\.json: not a manifest"):
        Dataset.open(tmp_path)


def test_another_schema_version_is_named(tmp_path: Path) -> None:
    write(tmp_path / "set", [([1], [1])])
    edit_manifest(tmp_path / "set", schema_version=99)
    with pytest.raises(DataError, match=r"manifest\.json: needed schema version 1, found 99"):
        Dataset.open(tmp_path / "set")


def test_zero_samples_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "set", [([1], [1])])
    edit_manifest(tmp_path / "set", num_samples=0, files=[])
    with pytest.raises(DataError, match="needed at least one sample, found none"):
        Dataset.open(tmp_path / "set")


def test_counts_that_disagree_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "set", make_samples(7))
    edit_manifest(tmp_path / "set", num_samples=8)
    with pytest.raises(DataError, match="needed files with 8 samples in all, found 7"):
        Dataset.open(tmp_path / "set")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    write(tmp_path / "set", make_samples(7))
    (tmp_path / "set" / "data-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"data-00001\.arrow \(rows 5 to 6\): needed a file of \d+ bytes, found none"):
        Dataset.open(tmp_path / "set")


def test_a_file_cut_short_is_named(tmp_path: Path) -> None:
    write(tmp_path / "set", make_samples(7))
    path = tmp_path / "set" / "data-00001.arrow"
    num_bytes = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match=rf"data-00001\.arrow \(rows 5 to 6\): needed {num_bytes} bytes, found {num_bytes - 1}"):
        Dataset.open(tmp_path / "set")


def replace_file(folder: Path, content: bytes) -> None:
    """Put other bytes in the place of the first file, as if the manifest had been written for them."""
    (folder / "data-00000.arrow").write_bytes(content)
    files = json.loads((folder / "manifest.json").read_text())["files"]
    edit_manifest(folder, files=[files[0] | {"num_bytes": len(content)}, *files[1:]])


def to_arrow(batch: pa.RecordBatch) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return bytes(sink.getvalue())


def test_a_file_that_is_no_arrow_file_is_named_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "set", make_samples(7))
    replace_file(tmp_path / "set", b"x" * 4096)
    dataset = Dataset.open(tmp_path / "set")
    dataset.read(6)  # in the other file, which is not damaged
    with pytest.raises(DataError, match=r"data-00000\.arrow: needed an Arrow IPC file, found"):
        dataset.read(0)


def test_a_file_of_another_schema_is_named_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "set", make_samples(5))
    replace_file(tmp_path / "set", to_arrow(pa.record_batch([pa.array([1, 2, 3, 4, 5])], names=["tokens"])))
    with pytest.raises(DataError, match=r"data-00000\.arrow: needed the columns .*, found tokens int64 \(rows 0 to 4\)"):
        _ = Dataset.open(tmp_path / "set").lengths


def test_a_file_with_another_number_of_rows_is_named_when_it_is_read(tmp_path: Path) -> None:
    write(tmp_path / "set", make_samples(5))
    batch = to_batch([Sample(np.ones(1, np.int32), np.ones(1, np.bool_))])
    replace_file(tmp_path / "set", to_arrow(batch))
    with pytest.raises(DataError, match=r"data-00000\.arrow \(rows 0 to 4\): needed 5 rows, found 1"):
        _ = Dataset.open(tmp_path / "set").lengths
