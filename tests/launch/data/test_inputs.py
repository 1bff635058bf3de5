"""Files of conversations: every format, every way in which text files differ, and files cut short."""

import argparse
import bz2
import gzip
import json
import lzma
from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from common.errors import DataError
from launch.data.inputs import ROWS_PER_CHUNK, Input, find_files, find_skipped, parse_input, read_chunks
from tests.builders.saved_sets import save_set

ROWS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "ä"}, {"role": "assistant", "content": "b"}], "category": "x"},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"name": "f", "x": None}]}]},
]
TRIMMED = [ROWS[0], {"messages": [{"role": "assistant", "tool_calls": [{"name": "f"}]}]}]


def read(path: Path, **settings: Any) -> list[Any]:
    """All rows, JSON parsed; what every chunk says of its size adds up to the file's."""
    chunks = list(read_chunks(Input(path, **settings)))
    assert all(0 < len(chunk.rows) <= ROWS_PER_CHUNK for chunk in chunks)
    rows = [row for chunk in chunks for row in chunk.rows]
    return [json.loads(row) if isinstance(row, bytes) else row for row in rows]


def compress_zstd(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return bytes(sink.getvalue())


def lines(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", lines(ROWS)),
        ("a.jsonl", lines(ROWS).rstrip()),  # no line feed at the end
        ("a.jsonl", b"\xef\xbb\xbf" + lines(ROWS)),  # byte order mark
        ("a.jsonl", lines(ROWS).replace(b"\n", b"\r\n")),
        ("a.jsonl", b"\n  \n" + lines(ROWS).replace(b"\n", b"\n\n")),  # blank lines
        ("a.jsonl.gz", gzip.compress(lines(ROWS))),
        ("a.json", json.dumps(ROWS, indent=1).encode()),
        ("a.json", b"\xef\xbb\xbf " + json.dumps(ROWS).encode()),
        ("a.json.gz", gzip.compress(json.dumps(ROWS).encode())),
        ("a.json", lines(ROWS)),  # lines under the other name
        ("a.json", json.dumps({"version": 1, "data": ROWS}).encode()),
        ("a.json", json.dumps({"data": ROWS}, indent=2).encode()),
        ("a.jsonl.bz2", bz2.compress(lines(ROWS))),
        ("a.jsonl.xz", lzma.compress(lines(ROWS))),
        ("a.jsonl.zst", compress_zstd(lines(ROWS[:1])) + compress_zstd(lines(ROWS[1:]))),  # two frames
        ("a.json.zst", compress_zstd(json.dumps(ROWS).encode())),
        ("a.jsonl", gzip.compress(lines(ROWS))),  # named without its compression
    ],
)
def test_text_files(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert read(tmp_path / name) == ROWS


def test_parquet_and_arrow_drop_the_nulls_that_their_columns_add(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    pq.write_table(table, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "file.arrow"), table.schema) as writer:
        writer.write_table(table)
    with pa.OSFile(str(tmp_path / "stream.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    for name in ("a.parquet", "file.arrow", "stream.arrow"):
        assert read(tmp_path / name) == TRIMMED, name


def test_a_folder_is_its_files_in_order_and_a_saved_set_its_arrow_files(tmp_path: Path) -> None:
    (tmp_path / "set" / "b").mkdir(parents=True)
    (tmp_path / "set" / "b" / "2.jsonl").write_bytes(lines(ROWS[1:]))
    (tmp_path / "set" / "1.jsonl.gz").write_bytes(gzip.compress(lines(ROWS[:1])))
    (tmp_path / "set" / "README.md").write_text("no rows")
    assert read(tmp_path / "set") == ROWS
    saved = save_set(tmp_path / "saved", [([1, 2], [0, 1]), ([3], [1])])
    assert read(saved) == [
        {"input_ids": [1, 2], "loss_mask": [0, 1]},
        {"input_ids": [3], "loss_mask": [1]},
    ]


def test_the_first_rows_only(tmp_path: Path) -> None:
    rows = [{"id": number} for number in range(2 * ROWS_PER_CHUNK + 3)]
    (tmp_path / "a.jsonl").write_bytes(lines(rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    for path in (tmp_path / "a.jsonl", tmp_path / "a.json"):
        for count in (1, ROWS_PER_CHUNK, ROWS_PER_CHUNK + 1, 10_000):
            assert read(path, max_rows=count) == rows[:count]


def test_a_message_of_a_megabyte_is_one_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(lines([{"text": "x" * 1_000_000}, *ROWS]))
    assert [len(str(row)) > 1_000_000 for row in read(tmp_path / "a.jsonl")] == [True, False, False]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "file.arrow", "stream.arrow", "a.parquet"])
def test_a_file_cut_short_is_named(tmp_path: Path, name: str) -> None:
    path, table = tmp_path / name, pa.Table.from_pylist(ROWS * 100)
    if name == "a.parquet":
        pq.write_table(table, path)
    elif name == "file.arrow":
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table)
    elif name == "stream.arrow":
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as stream:
            stream.write_table(table, max_chunksize=50)
    else:
        path.write_bytes(gzip.compress(lines(ROWS * 100) if name == "a.jsonl.gz" else json.dumps(ROWS * 100).encode()))
    content = path.read_bytes()
    for num_bytes in (8, 9, len(content) // 2):
        path.write_bytes(content[:-num_bytes])
        with pytest.raises(DataError, match=rf"{name}: cannot be read to its end: ."):
            read(path)


def test_a_broken_list_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"messages": []},')
    with pytest.raises(DataError, match=r"a\.json: cannot be read to its end: Expecting"):
        read(tmp_path / "a.json")


def test_nothing_to_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="absent: needed a file or a folder, found none"):
        find_files(tmp_path / "absent")
    with pytest.raises(DataError, match=r"needed files that end in \.arrow, \.json.*found none"):
        find_files(tmp_path)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (lines(ROWS).decode().encode("utf-16"), "needed UTF-8, found UTF-16"),
        (lines(ROWS).decode().encode("utf-16-le"), "needed UTF-8, found UTF-16-LE"),
        (b"PK\3\4rest", "needed JSON, found a zip archive"),
    ],
)
def test_text_that_is_none_is_named(tmp_path: Path, content: bytes, found: str) -> None:
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: {found}"):
            read(tmp_path / name)


def test_a_damaged_first_row_of_lines_is_a_row(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'{"messages": [\n' + lines(ROWS))
    rows = [row for chunk in read_chunks(Input(tmp_path / "a.json")) for row in chunk.rows]
    assert rows[0] == b'{"messages": [' and len(rows) == 3


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_points_in_time_are_no_reason_to_refuse_a_file(tmp_path: Path, name: str) -> None:
    """Neither in columns that nobody reads nor within a message: nanoseconds, and dates after the year 9999."""
    days = pa.array([4_000_000], pa.int32()).cast(pa.date32())
    times = {
        f"{unit}{kind}": pa.array([1], make(unit))
        for kind, make in (("t", pa.timestamp), ("d", pa.duration))
        for unit in ("ns", "s")
    }
    turn = pa.StructArray.from_arrays(
        [pa.array(["user"]), pa.array(["hi"]), days, times["nst"]], ["role", "content", "day", "time"]
    )
    messages = pa.ListArray.from_arrays([0, 1], turn)
    table = pa.table({"messages": messages, "category": days, **times, "born": pa.array([date(2020, 1, 1)])})
    if name == "a.parquet":
        pq.write_table(table, tmp_path / name)
    else:
        with pa.ipc.new_file(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    [row] = read(tmp_path / name)
    assert row["messages"] == [{"role": "user", "content": "hi", "day": 4_000_000, "time": 1}]
    assert set(row) == {"messages", "category"}


def test_functions_beside_the_messages_are_read_from_a_table(tmp_path: Path) -> None:
    row = {"messages": [{"role": "user", "content": "a"}], "functions": [{"name": "f"}]}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [row]


def test_rows_without_a_column_that_is_read_are_rows(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet") == [{}, {}]


def test_several_splits_under_one_name_are_refused(tmp_path: Path) -> None:
    for split in ("train", "test"):
        save_set(tmp_path / "all" / split, [([1, 2], [0, 1])])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for folder in (tmp_path / "all", tmp_path):
        with pytest.raises(DataError, match="found the splits test, train: name the folder of one"):
            read(folder)
    (tmp_path / "all" / "test" / "cache-1.arrow").write_bytes(b"of map()")
    assert read(tmp_path / "all" / "test") == [{"input_ids": [1, 2], "loss_mask": [0, 1]}]


def test_files_that_are_not_read_are_found(tmp_path: Path) -> None:
    for name in ("a.jsonl.zst", "b.csv", "c.zip"):
        (tmp_path / name).write_bytes(b"")
    assert [path.name for path in find_skipped(tmp_path)] == ["b.csv", "c.zip"]
    assert [path.name for path in find_files(tmp_path)] == ["a.jsonl.zst"]


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("a.jsonl", Input(Path("a.jsonl"))),
        ("a.jsonl,weight=0.5,rows=10", Input(Path("a.jsonl"), 0.5, 10)),
        ("a.jsonl,rows=10", Input(Path("a.jsonl"), max_rows=10)),
    ],
)
def test_weights_and_limits_are_read(text: str, source: Input) -> None:
    assert parse_input(text) == source


@pytest.mark.parametrize("text", ["a,weight=0", "a,rows=-1", "a,rows=x", "a,copies=2", "a,"])
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"needed PATH\[,weight=W\]\[,rows=N\]"):
        parse_input(text)
