"""Several evaluation sets as one, and the categories of samples wherever they come from."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from common.config import DataConfig
from common.data.arrow_file import SCHEMA, ArrowFile, Sample, to_batch
from common.data.dataset import Dataset
from common.data.held_out import HeldOut
from common.errors import DataError
from launch.data.writer import DatasetWriter
from tests.builders.saved_sets import save_set

CATEGORIES = {"gsm8k": ["", "", ""], "chat": ["maths", "stories", "", "maths"], "code": ["python"]}


def write_set(folder: Path, categories: list[str], first: int = 0) -> str:
    """One sample of three tokens per category, in files of two; the first token numbers the sample."""
    with DatasetWriter(folder, {}, rows_per_file=2) as writer:
        for number, category in enumerate(categories, start=first):
            writer.add([number, 1, 2], [0, 1, 1], category)
    return str(folder)


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    firsts = np.cumsum([0, *map(len, CATEGORIES.values())]).tolist()
    sets = zip(CATEGORIES.items(), firsts, strict=False)
    paths = {name: write_set(tmp_path / name, kinds, first) for (name, kinds), first in sets}
    return DataConfig(path="unused", eval_paths=paths)


def test_ids_run_on_from_set_to_set(data: DataConfig) -> None:
    held_out = HeldOut.open(data)
    assert held_out.num_samples == 8
    assert [int(held_out.read(sample_id).input_ids[0]) for sample_id in range(8)] == list(range(8))
    located = [held_out.locate(sample_id) for sample_id in range(8)]
    assert located == [(name, index) for name, found in CATEGORIES.items() for index in range(len(found))]
    assert held_out.groups() == [(name, category) for name, found in CATEGORIES.items() for category in found]
    assert held_out.read(4).category == "stories"


def test_a_single_set_is_named_after_its_folder_and_none_is_empty(tmp_path: Path, data: DataConfig) -> None:
    single = DataConfig(path="unused", eval_path=data.eval_paths["chat"])
    assert single.eval_sets == {"chat": data.eval_paths["chat"]}
    assert HeldOut.open(single).groups()[0] == ("chat", "maths")
    nothing = HeldOut.open(DataConfig(path="unused"))
    assert (nothing.num_samples, nothing.groups()) == (0, [])


def test_the_category_changes_neither_checksum_nor_fingerprint(tmp_path: Path) -> None:
    named = Dataset.open(Path(write_set(tmp_path / "a", ["maths", "code"])))
    unnamed = Dataset.open(Path(write_set(tmp_path / "b", ["", ""])))
    assert named.fingerprint == unnamed.fingerprint
    assert named.categories == ["maths", "code"] and unnamed.categories == ["", ""]


def test_files_of_before_there_were_categories_are_read(tmp_path: Path) -> None:
    rows = [Sample(np.array([7, 8], np.int32), np.array([False, True]), "dropped")]
    batch = to_batch(rows).select(["input_ids", "loss_mask", "length", "checksum"])
    schema = pa.schema([field for field in SCHEMA if field.name != "category"])
    with pa.ipc.new_file(str(tmp_path / "old.arrow"), schema) as writer:
        writer.write_batch(batch)
    file = ArrowFile(tmp_path / "old.arrow")
    assert file.categories() == [""]
    assert (file.read(0).input_ids.tolist(), file.read(0).category) == ([7, 8], "")


@pytest.mark.parametrize(
    ("kind", "found"), [(pa.string(), ["maths", ""]), (pa.large_string(), ["maths", ""]), (pa.int64(), ["", ""])]
)
def test_a_category_column_of_hugging_face_may_have_nulls_or_mean_something_else(
    tmp_path: Path, kind: pa.DataType, found: list[str]
) -> None:
    folder = save_set(tmp_path / "saved", [([1, 2], [0, 1]), ([3, 4], [0, 1])])
    for path in folder.glob("*.arrow"):
        with pa.OSFile(str(path)) as source:
            (batch,) = pa.ipc.open_stream(source)
        value = 5 if kind == pa.int64() else "maths"
        values = pa.array([value if path.name.startswith("data-00000") else None], kind)
        named = pa.record_batch([*batch.columns, values], schema=batch.schema.append(pa.field("category", kind)))
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, named.schema) as writer:
            writer.write_batch(named)
    assert Dataset.open(folder).categories == found


def test_categories_of_a_file_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    write_set(tmp_path / "chat", CATEGORIES["chat"])
    path = tmp_path / "chat/data-00000.arrow"
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(DataError, match=r"data-00000\.arrow.*rows 0 to 1"):
        HeldOut.open(DataConfig(path="unused", eval_path=str(tmp_path / "chat"))).groups()
