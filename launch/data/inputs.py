"""Read files of conversations as raw rows in the order of the file: JSON lines, JSON, Parquet, Arrow.

Text may be compressed by gzip, bzip2, xz or zstd. A JSON file is a list of rows, `{"data": [...]}`, or one row per line.
A folder is all its files in the order of their names; one that Hugging Face `datasets` saved is its Arrow files.
A row is a line of JSON as bytes, or an object. Blank lines and a byte order mark are no rows.

Lines are read by `json`, not by pyarrow.json, which gives every key one type per block: `content` as a text in one row
and as a list of parts in the next is an error there, and integers beside fractions become fractions.
"""

import argparse
import bz2
import gzip
import io
import json
import lzma
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from common.data.arrow_file import map_batches
from common.data.saved_dataset import is_saved_dataset, saved_files
from common.errors import DataError
from launch.data.conversations import CATEGORY_KEYS

ROWS_PER_CHUNK = 256
_BOM = b"\xef\xbb\xbf"
_SUFFIXES = {".jsonl", ".json", ".ndjson", ".parquet", ".arrow"}
_COMPRESSED = {".gz", ".bz2", ".xz", ".zst"}
_COLUMNS = {
    *("messages", "conversations", "system", "tools", "functions", "finished", "prompt", "turns", *CATEGORY_KEYS),
    *("input_ids", "loss_mask", "prompt_ids", "answer_ids", "answers"),
}
_DECOMPRESS: dict[bytes, Any] = {  # by the first bytes of a file
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ\0": lzma.open,
    b"\x28\xb5\x2f\xfd": lambda raw: io.BufferedReader(pa.CompressedInputStream(raw, "zstd")),
}
_UNREADABLE = {
    b"PK\3\4": "a zip archive",
    b"7z\xbc\xaf": "a 7z archive",
    b'\4"M\x18': "LZ4",
    b"PAR1": "Parquet",
    b"ARRO": "Arrow",
}


class Input(NamedTuple):
    """One data set among others."""

    path: Path
    weight: float = 1.0  # how often each row is used; of 2.5 every row twice and every second row once more
    max_rows: int | None = None  # only the first rows


class Chunk(NamedTuple):
    """Rows that are converted together."""

    rows: list[Any]
    num_bytes: int  # of the file


def parse_input(text: str) -> Input:
    """Parse PATH[,weight=W][,rows=N], for argparse."""
    path, *settings = text.split(",")
    try:
        given = dict(setting.split("=") for setting in settings)
        max_rows = int(given.pop("rows")) if "rows" in given else None
        source = Input(Path(path).expanduser(), float(given.pop("weight", 1)), max_rows)
        if not given and source.weight > 0 and (max_rows is None or max_rows > 0):
            return source
    except ValueError:
        pass
    needed = "PATH[,weight=W][,rows=N] with positive W and N"
    raise argparse.ArgumentTypeError(f"{text}: needed {needed}, found {','.join(settings)}")


def find_files(path: Path) -> list[Path]:
    """Return the files of an input. DataError for none of a known kind, or for several splits under one name."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: needed a file or a folder, found none")
    files = [file for file in _files_under(path) if _kind(file) in _SUFFIXES]
    if not files:
        raise DataError(f"{path}: needed files that end in {', '.join(sorted(_SUFFIXES))}, or these and .gz, found none")
    return files


def find_skipped(path: Path) -> list[Path]:
    """Return the files in a folder that are no rows as far as their names tell."""
    return [file for file in _files_under(path) if _kind(file) not in _SUFFIXES] if path.is_dir() else []


def read_chunks(source: Input) -> Iterator[Chunk]:
    """Yield all rows of an input, up to its limit. DataError where a file cannot be read to its end."""
    num_rows = 0
    for path in find_files(source.path):
        for chunk in _read_file(path):
            rows = chunk.rows if source.max_rows is None else chunk.rows[: source.max_rows - num_rows]
            num_rows += len(rows)
            if rows:
                yield Chunk(rows, chunk.num_bytes)
            if num_rows == source.max_rows:
                return


def _files_under(folder: Path) -> Iterator[Path]:
    """Yield all files in the order of their names; of a folder that `datasets` saved those that hold its rows."""
    if is_saved_dataset(folder):
        yield from saved_files(folder)
        return
    for path in sorted(folder.iterdir()):
        if path.is_file():
            yield path
        elif path.is_dir() and not path.is_symlink():
            yield from _files_under(path)


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in _COMPRESSED else path.suffix


def _read_file(path: Path) -> Iterator[Chunk]:
    try:
        if _kind(path) == ".parquet":
            yield from _read_parquet(path)
        elif _kind(path) == ".arrow":
            for batch in map_batches(path)[1]:
                for start in range(0, batch.num_rows, ROWS_PER_CHUNK):
                    part = batch.slice(start, ROWS_PER_CHUNK)
                    yield Chunk(_to_rows(part), part.nbytes)
        elif _kind(path) == ".json" and _is_one_value(path):
            yield from _read_value(path)
        else:
            yield from _read_lines(path)
    except (OSError, EOFError, ValueError, RecursionError, zlib.error, lzma.LZMAError, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read to its end: {error}") from error


def _open(path: Path, raw: Any) -> Any:
    """Return the text of a file, decompressed. DataError where it is no text in UTF-8."""
    start = raw.read(6)
    raw.seek(0)
    text = next((decompress(raw) for magic, decompress in _DECOMPRESS.items() if start.startswith(magic)), raw)
    start = text.peek(6)[:6]
    if found := _UNREADABLE.get(start[:4]):
        raise DataError(f"{path}: needed JSON, found {found}")
    if not (encoding := json.detect_encoding(start)).startswith("utf-8"):
        raise DataError(f"{path}: needed UTF-8, found {encoding.upper()}")
    return text


def _is_one_value(path: Path) -> bool:
    """Tell a list of rows, or an object of several lines or with `data`, from one row per line."""
    with path.open("rb") as raw, _open(path, raw) as file:
        lines = filter(None, (line.removeprefix(_BOM).strip() for line in file))
        first, second = next(lines, b""), next(lines, b"")
    if not first.startswith(b"{"):
        return first.startswith(b"[")
    if second:
        return not second.startswith(b"{") and not first.endswith(b"}")
    try:
        return isinstance(json.loads(first).get("data"), list)
    except (ValueError, RecursionError):
        return False  # a damaged row


def _read_value(path: Path) -> Iterator[Chunk]:
    with path.open("rb") as raw, _open(path, raw) as file:
        value = json.loads(file.read().removeprefix(_BOM))
    rows = [value] if isinstance(value, dict) and not isinstance(value.get("data"), list) else value
    rows = rows["data"] if isinstance(rows, dict) else rows
    num_bytes = path.stat().st_size
    for start in range(0, len(rows), ROWS_PER_CHUNK):
        part = rows[start : start + ROWS_PER_CHUNK]
        yield Chunk(part, num_bytes * len(part) // len(rows))


def _read_lines(path: Path) -> Iterator[Chunk]:
    rows: list[bytes] = []
    with path.open("rb") as raw, _open(path, raw) as lines:
        offset = 0
        for number, line in enumerate(lines):
            text = (line.removeprefix(_BOM) if number == 0 else line).strip()
            if text:
                rows.append(text)
            if len(rows) == ROWS_PER_CHUNK:
                yield Chunk(rows, raw.tell() - offset)
                rows, offset = [], raw.tell()
        yield Chunk(rows, path.stat().st_size - offset)


def _read_parquet(path: Path) -> Iterator[Chunk]:
    num_bytes = path.stat().st_size
    with pq.ParquetFile(path) as file:
        columns = [name for name in file.schema_arrow.names if name in _COLUMNS]
        for batch in file.iter_batches(ROWS_PER_CHUNK, columns=columns):
            share = batch.num_rows / max(1, file.metadata.num_rows)
            yield Chunk(_to_rows(batch), int(num_bytes * share))


def _to_rows(batch: pa.RecordBatch) -> list[Any]:
    """Return the columns that are read, without the nulls that Arrow gives an object for keys that only others have."""
    names = [name for name in batch.schema.names if name in _COLUMNS]
    columns = [batch.column(name).cast(_without_times(batch.schema.field(name).type)).to_pylist() for name in names]
    rows = zip(*columns, strict=True) if names else [()] * batch.num_rows
    return [_without_nulls(dict(zip(names, row, strict=True))) for row in rows]


def _without_times(kind: pa.DataType) -> pa.DataType:
    """Return the type with integers for points in time: not every one of them has a Python object."""
    if pa.types.is_temporal(kind) and not pa.types.is_interval(kind):
        return pa.int64() if kind.bit_width == 64 else pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_times(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        make = pa.list_ if pa.types.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_without_times(kind.value_type)))
    return kind


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return value if value and isinstance(value[0], int) else [_without_nulls(item) for item in value]
    return value
