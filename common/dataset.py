"""The prepared data set: token ids and loss masks in memory-mapped Arrow files, with a manifest.

    <folder>/manifest.json      what is here, checked when opened
    <folder>/data-00000.arrow   Arrow IPC file format: input_ids list<int32>, loss_mask list<uint8>, length int32

One row is one sample; the sample id is the row's number over all files. Shapes: n tokens of one sample.
"""

import bisect
import hashlib
import itertools
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from common.errors import DataError

SCHEMA_VERSION = 1
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("loss_mask", pa.list_(pa.uint8())), ("length", pa.int32())])
ROWS_PER_BATCH = 1024

Int32Array = npt.NDArray[np.int32]
BoolArray = npt.NDArray[np.bool_]


class Sample(NamedTuple):
    """One document: input_ids int32 [n], loss_mask bool [n] (True where a token is supervised)."""

    input_ids: Int32Array
    loss_mask: BoolArray


class FileEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One Arrow file of a data set."""

    name: str
    num_rows: int
    num_bytes: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What `manifest.json` says; `source` is free and tells where the samples came from."""

    schema_version: int
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int
    max_length: int
    fingerprint: str
    files: list[FileEntry]
    source: dict[str, Any]


class Dataset:
    """Read access. Opening reads the manifest only; each Arrow file is mapped when first needed."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ends = list(itertools.accumulate(entry.num_rows for entry in manifest.files))
        self._batches: list[list[pa.RecordBatch] | None] = [None] * len(manifest.files)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Check the manifest and the sizes of the files it names.

        Raises:
            DataError: no folder, no manifest, zero samples, or a file that is missing or cut short.
        """
        manifest = read_manifest(folder)
        for entry in manifest.files:
            _check_size(folder / entry.name, entry)
        num_rows = sum(entry.num_rows for entry in manifest.files)
        if num_rows != manifest.num_samples:
            raise DataError(f"{folder}: needed files with {manifest.num_samples} samples in all, found {num_rows}")
        if num_rows == 0:
            raise DataError(f"{folder}: needed at least one sample, found none")
        return cls(folder, manifest)

    @property
    def num_samples(self) -> int:
        """Number of samples; ids run from 0."""
        return self.manifest.num_samples

    @property
    def fingerprint(self) -> str:
        """SHA-256 of all samples in order, whatever files they are cut into."""
        return self.manifest.fingerprint

    @property
    def lengths(self) -> Int32Array:
        """int32 [num_samples], tokens per sample, from the length column alone. DataError as `read`."""
        batches = itertools.chain.from_iterable(self._open_file(i) for i in range(len(self._ends)))
        return np.concatenate([batch.column("length").to_numpy() for batch in batches])

    def read(self, sample_id: int) -> Sample:
        """A copy of one sample.

        Raises:
            DataError: the sample's file is no Arrow file, or has another schema or number of rows.
        """
        assert 0 <= sample_id < self.num_samples, f"sample {sample_id} of {self.num_samples}"
        file = bisect.bisect_right(self._ends, sample_id)
        row = sample_id - self._ends[file] + self.manifest.files[file].num_rows
        batch = self._open_file(file)[row // ROWS_PER_BATCH]
        row %= ROWS_PER_BATCH
        input_ids = batch.column("input_ids")[row].values.to_numpy().copy()
        loss_mask = batch.column("loss_mask")[row].values.to_numpy().astype(np.bool_)
        return Sample(input_ids, loss_mask)

    def _open_file(self, file: int) -> list[pa.RecordBatch]:
        batches = self._batches[file]
        if batches is None:
            entry = self.manifest.files[file]
            batches = self._batches[file] = _map_file(self.folder / entry.name, entry)
        return batches


class DatasetWriter:
    """Writes a new data set aside and renames it when it is complete; after an error nothing is left.

        with DatasetWriter(folder, source={"input": "conversations.jsonl"}) as writer:
            writer.add(input_ids, loss_mask)

    Raises:
        DataError: the folder exists already, a sample is malformed, or no sample was added.
    """

    def __init__(self, folder: Path, source: dict[str, Any], rows_per_file: int = 64 * ROWS_PER_BATCH) -> None:
        assert rows_per_file >= 1
        if folder.exists():
            raise DataError(f"{folder}: needed a new folder, found one that exists")
        self.folder = folder
        self._aside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
        self._source = source
        self._rows_per_file = rows_per_file
        self._content = hashlib.sha256()
        self._rows: list[Sample] = []
        self._files: list[FileEntry] = []
        self._num_samples = self._num_tokens = self._num_supervised_tokens = self._max_length = 0

    def __enter__(self) -> Self:
        shutil.rmtree(self._aside, ignore_errors=True)  # of a killed process that had our id
        self._aside.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)

    def add(self, input_ids: npt.ArrayLike, loss_mask: npt.ArrayLike) -> None:
        """Append one sample: token ids [n] and 0/1 or bool [n]."""
        sample = Sample(np.asarray(input_ids, np.int32), np.asarray(loss_mask, np.bool_))
        self._check(sample)
        length = len(sample.input_ids)
        self._content.update(np.int64(length).tobytes() + sample.input_ids.tobytes() + sample.loss_mask.tobytes())
        self._num_samples += 1
        self._num_tokens += length
        self._num_supervised_tokens += int(sample.loss_mask.sum())
        self._max_length = max(self._max_length, length)
        self._rows.append(sample)
        if len(self._rows) == self._rows_per_file:
            self._write_file()

    def _check(self, sample: Sample) -> None:
        input_ids, loss_mask = sample
        where = f"{self.folder}: sample {self._num_samples}"
        if input_ids.ndim != 1 or input_ids.shape != loss_mask.shape:
            raise DataError(f"{where}: needed input_ids and loss_mask [n], found {input_ids.shape} and {loss_mask.shape}")
        if not input_ids.size:
            raise DataError(f"{where}: needed at least one token, found none")
        if input_ids.min() < 0:
            raise DataError(f"{where}: needed token ids from 0, found {input_ids.min()}")

    def _write_file(self) -> None:
        path = self._aside / f"data-{len(self._files):05}.arrow"
        with path.open("wb") as sink, pa.ipc.new_file(sink, SCHEMA) as writer:
            for start in range(0, len(self._rows), ROWS_PER_BATCH):
                writer.write_batch(_to_batch(self._rows[start : start + ROWS_PER_BATCH]))
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        self._files.append(FileEntry(path.name, len(self._rows), path.stat().st_size, digest))
        self._rows = []

    def _finish(self) -> None:
        if not self._num_samples:
            raise DataError(f"{self.folder}: needed at least one sample to write, found none")
        if self._rows:
            self._write_file()
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            num_samples=self._num_samples,
            num_tokens=self._num_tokens,
            num_supervised_tokens=self._num_supervised_tokens,
            max_length=self._max_length,
            fingerprint=self._content.hexdigest(),
            files=self._files,
            source=self._source,
        )
        with (self._aside / "manifest.json").open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        _fsync_folder(self._aside)
        self._aside.rename(self.folder)
        _fsync_folder(self.folder.parent)


def read_manifest(folder: Path) -> Manifest:
    """Read `folder`/manifest.json.

    Raises:
        DataError: no folder, no manifest, or one of another schema version.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: needed a prepared data set, found no such folder (make one with launch.prepare)")
    path = folder / "manifest.json"
    try:
        content = path.read_bytes()
        version = msgspec.json.decode(content).get("schema_version")
        if version != SCHEMA_VERSION:
            raise DataError(f"{path}: needed schema version {SCHEMA_VERSION}, found {version}")
        return msgspec.json.decode(content, type=Manifest)
    except FileNotFoundError as error:
        raise DataError(f"{folder}: needed manifest.json, found none (not a prepared data set, see launch.prepare)") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, AttributeError) as error:
        raise DataError(f"{path}: not a manifest: {error}") from error


def _check_size(path: Path, entry: FileEntry) -> None:
    if not path.is_file():
        raise DataError(f"{path}: needed a file of {entry.num_bytes} bytes, found none")
    num_bytes = path.stat().st_size
    if num_bytes != entry.num_bytes:
        raise DataError(f"{path}: needed {entry.num_bytes} bytes, found {num_bytes}")


def _map_file(path: Path, entry: FileEntry) -> list[pa.RecordBatch]:
    """The record batches of a file: views of its mapping, which they keep open."""
    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path}: needed an Arrow IPC file, found: {error}") from error
    if not reader.schema.equals(SCHEMA):
        raise DataError(f"{path}: needed the columns {_describe(SCHEMA)}, found {_describe(reader.schema)}")
    num_rows = [batch.num_rows for batch in batches]
    if sum(num_rows) != entry.num_rows:
        raise DataError(f"{path}: needed {entry.num_rows} rows, found {sum(num_rows)}")
    if any(rows != ROWS_PER_BATCH for rows in num_rows[:-1]):
        raise DataError(f"{path}: needed record batches of {ROWS_PER_BATCH} rows, found {num_rows}")
    return batches


def _describe(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)


def _to_batch(rows: list[Sample]) -> pa.RecordBatch:
    lengths = np.array([len(row.input_ids) for row in rows], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    input_ids = pa.ListArray.from_arrays(offsets, np.concatenate([row.input_ids for row in rows]))
    loss_mask = pa.ListArray.from_arrays(offsets, np.concatenate([row.loss_mask for row in rows]).view(np.uint8))
    return pa.record_batch([input_ids, loss_mask, pa.array(lengths)], schema=SCHEMA)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
