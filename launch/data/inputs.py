"""Files of conversations, as raw rows in the order of the file: JSON lines, JSON, Parquet, Arrow; plain or gzip.

A folder is all its files in the order of their names; one that Hugging Face `datasets` saved is its Arrow files.
A row is a line of JSON as bytes, or an object. Blank lines and a byte order mark are no rows.
"""

import argparse
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from common.data.arrow_file import END_OF_STREAM
from common.errors import DataError

ROWS_PER_CHUNK = 256
_BOM = b"\xef\xbb\xbf"
_SUFFIXES = {".jsonl", ".json", ".ndjson", ".parquet", ".arrow"}


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
    """PATH[,weight=W][,rows=N], for argparse."""
    path, *settings = text.split(",")
    chosen = Input(Path(path).expanduser())
    for setting in settings:
        key, _, value = setting.partition("=")
        try:
            if key == "weight" and float(value) > 0:
                chosen = chosen._replace(weight=float(value))
                continue
            if key == "rows" and int(value) > 0:
                chosen = chosen._replace(max_rows=int(value))
                continue
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text}: needed PATH[,weight=W][,rows=N] with W and N above 0, found {setting}")
    return chosen


def find_files(path: Path) -> list[Path]:
    """The files of an input.

    Raises:
        DataError: nothing is there, or nothing of a known kind.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise DataError(f"{path}: needed a file or a folder, found none")
    if (path / "state.json").is_file():
        return sorted(path.glob("*.arrow"))
    files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in _SUFFIXES)
    if not files:
        raise DataError(f"{path}: needed files that end in {', '.join(sorted(_SUFFIXES))} or these and .gz, found none")
    return files


def fingerprint(path: Path) -> str:
    """SHA-256 of the contents of an input's files in their order."""
    total = hashlib.sha256()
    for name in find_files(path):
        with name.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def read_chunks(source: Input) -> Iterator[Chunk]:
    """All rows of an input, up to its limit.

    Raises:
        DataError: a file cannot be read to its end.
    """
    left = source.max_rows
    for path in find_files(source.path):
        for chunk in _read_file(path):
            rows = chunk.rows[:left]
            if rows:
                yield Chunk(rows, chunk.num_bytes)
            if left is not None:
                left -= len(rows)
                if left == 0:
                    return


def _kind(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix == ".gz" else path.suffix


def _read_file(path: Path) -> Iterator[Chunk]:
    try:
        if _kind(path) == ".parquet":
            yield from _read_parquet(path)
        elif _kind(path) == ".arrow":
            yield from _read_arrow(path)
        elif _kind(path) == ".json" and _starts_a_list(path):
            yield from _read_list(path)
        else:
            yield from _read_lines(path)
    except (OSError, EOFError, ValueError, zlib.error, pa.ArrowException) as error:
        raise DataError(f"{path}: cannot be read to its end: {error}") from error


def _open(path: Path) -> Any:
    return gzip.open(path) if path.suffix == ".gz" else path.open("rb")


def _starts_a_list(path: Path) -> bool:
    with _open(path) as file:
        start: bytes = file.read(4096)
    return start.removeprefix(_BOM).lstrip().startswith(b"[")


def _read_list(path: Path) -> Iterator[Chunk]:
    with _open(path) as file:
        rows = json.loads(file.read().removeprefix(_BOM))
    yield from _cut(rows, path.stat().st_size)


def _read_lines(path: Path) -> Iterator[Chunk]:
    rows: list[bytes] = []
    with path.open("rb") as raw, gzip.open(raw) if path.suffix == ".gz" else raw as lines:
        place = 0
        for number, line in enumerate(lines):
            text = (line.removeprefix(_BOM) if number == 0 else line).strip()
            if text:
                rows.append(text)
            if len(rows) == ROWS_PER_CHUNK:
                yield Chunk(rows, raw.tell() - place)
                rows, place = [], raw.tell()
        yield Chunk(rows, raw.tell() - place)


def _read_parquet(path: Path) -> Iterator[Chunk]:
    num_bytes = path.stat().st_size
    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(ROWS_PER_CHUNK):
            share = batch.num_rows / max(1, file.metadata.num_rows)
            yield Chunk(_to_rows(batch), int(num_bytes * share))


def _read_arrow(path: Path) -> Iterator[Chunk]:
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(max(0, source.size() - len(END_OF_STREAM)))
        if not is_file and source.read() != END_OF_STREAM:
            raise DataError(f"{path}: cannot be read to its end: it has none (cut short?)")
        source.seek(0)
        reader = pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            yield from _cut(_to_rows(batch), batch.nbytes)


def _cut(rows: list[Any], num_bytes: int) -> Iterator[Chunk]:
    for start in range(0, len(rows), ROWS_PER_CHUNK):
        part = rows[start : start + ROWS_PER_CHUNK]
        yield Chunk(part, num_bytes * len(part) // len(rows))


def _to_rows(batch: pa.RecordBatch) -> list[Any]:
    """Arrow gives every object all keys that any has: those that hold null were not there."""
    return [_without_nulls(row) for row in batch.to_pylist()]


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return value if value and isinstance(value[0], int) else [_without_nulls(item) for item in value]
    return value
