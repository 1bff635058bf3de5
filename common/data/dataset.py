"""The prepared data set: token ids and loss masks in memory-mapped Arrow files, with a manifest.

    <folder>/manifest.json      what is here, checked when opened
    <folder>/data-00000.arrow   Arrow IPC file format, see common/data/arrow_file.py

One row is one sample; the sample id is the row's number over all files. A folder that Hugging Face
`datasets` saved is read as it is. Shapes: n tokens of one sample.
"""

import bisect
import fcntl
import hashlib
import itertools
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from common.data.arrow_file import SCHEMA, ArrowFile, Int32Array, Sample, to_batch
from common.data.manifest import SCHEMA_VERSION, FileEntry, Manifest, check_replaceable, encode_manifest, read_manifest
from common.data.saved_dataset import describe_saved_dataset, is_saved_dataset
from common.errors import DataError

ROWS_PER_BATCH = 1024
MAX_FILE_BYTES = 256 << 20


class Dataset:
    """Read access. Opening reads the manifest only; each Arrow file is mapped when first needed."""

    def __init__(self, folder: Path, manifest: Manifest, files: list[ArrowFile] | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ends = list(itertools.accumulate(entry.num_rows for entry in manifest.files))
        self._files: list[ArrowFile | None] = list(files) if files else [None] * len(manifest.files)

    @classmethod
    def open(cls, folder: Path, *, damaged: bool = False) -> Self:
        """Check the manifest and the sizes of the files it names; with `damaged` the files are taken as they are.

        Raises:
            DataError: no folder, no manifest, zero samples, or a file that is missing or cut short.
        """
        if not folder.is_dir():
            raise DataError(f"{folder}: needed a prepared data set, found no such folder (make one with launch.prepare)")
        if is_saved_dataset(folder):
            dataset = cls(folder, *describe_saved_dataset(folder))
        else:
            dataset = cls(folder, read_manifest(folder))
        for file in range(0 if damaged else len(dataset.manifest.files)):
            dataset.check_size(file)
        num_rows = sum(entry.num_rows for entry in dataset.manifest.files)
        if num_rows != dataset.num_samples:
            raise DataError(f"{folder}: needed files with {dataset.num_samples} samples in all, found {num_rows}")
        if num_rows == 0:
            raise DataError(f"{folder}: needed at least one sample, found none")
        return dataset

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
        """int32 [num_samples], tokens per sample, without touching the tokens. DataError as `read`."""
        return np.concatenate([self.file_lengths(file) for file in range(len(self._ends))])

    @property
    def categories(self) -> list[str]:
        """The category of every sample, "" where it has none or its file is unreadable."""
        return [category for file in range(len(self._ends)) for category in self._file_categories(file)]

    def rows_of(self, file: int) -> range:
        """The ids of the samples in a file."""
        return range(self._ends[file] - self.manifest.files[file].num_rows, self._ends[file])

    def file_lengths(self, file: int) -> Int32Array:
        """Tokens per sample of one file. DataError as `read`."""
        return self._open_file(file).lengths()

    def read(self, sample_id: int) -> Sample:
        """A copy of one sample.

        Raises:
            DataError: the sample or its file is damaged; the message names the rows.
        """
        assert 0 <= sample_id < self.num_samples, f"sample {sample_id} of {self.num_samples}"
        file = bisect.bisect_right(self._ends, sample_id)
        try:
            return self._open_file(file).read(sample_id - self.rows_of(file).start)
        except (DataError, pa.ArrowException) as error:
            where = "" if str(self.folder) in str(error) else f"{self._name(file)}: sample {sample_id}: "
            raise DataError(f"{where}{error}") from error

    def find_id_outside(self, vocab_size: int) -> tuple[int, int] | None:
        """Return the sample and the id of the first token that the vocabulary lacks, or None. DataError as `read`."""
        for file in range(len(self._ends)):
            if (found := self._open_file(file).find_id_outside(vocab_size)) is not None:
                sample = self.rows_of(file).start + found[0]
                self.read(sample)  # a damaged one is called so
                return sample, found[1]
        return None

    def has_supervised_token(self) -> bool:
        """Return whether there is anything to learn; reads masks only where the manifest does not say. DataError as `read`."""
        if self.manifest.num_supervised_tokens is not None:
            return self.manifest.num_supervised_tokens > 0
        return any(self._open_file(file).has_supervised_token() for file in range(len(self._ends)))

    def check_size(self, file: int) -> None:
        """DataError where a file is missing or of another size than the manifest says."""
        entry = self.manifest.files[file]
        path = self.folder / entry.name
        found = f"{path.stat().st_size}" if path.is_file() else "none"
        if found != f"{entry.num_bytes}":
            needed = f"{entry.num_bytes} bytes" if path.is_file() else f"a file of {entry.num_bytes} bytes"
            raise DataError(f"{self._name(file)}: needed {needed}, found {found}")

    def _file_categories(self, file: int) -> list[str]:
        try:
            return self._open_file(file).categories()
        except DataError:  # who needs the rows is told; a name for a group is no reason to fail
            return [""] * len(self.rows_of(file))

    def _name(self, file: int) -> str:
        rows = self.rows_of(file)
        return f"{self.folder / self.manifest.files[file].name} (rows {rows.start} to {rows.stop - 1})"

    def _open_file(self, file: int) -> ArrowFile:
        opened = self._files[file]
        if opened is None:
            entry = self.manifest.files[file]
            try:
                opened = ArrowFile(self.folder / entry.name)
            except DataError as error:
                raise DataError(f"{error} ({self._name(file).rpartition('(')[2]}") from error
            if opened.num_rows != entry.num_rows:
                raise DataError(f"{self._name(file)}: needed {entry.num_rows} rows, found {opened.num_rows}")
            self._files[file] = opened
        return opened


class DatasetWriter:
    """Writes a new data set aside and renames it when it is complete; after an error nothing is left.

        with DatasetWriter(folder, source={"input": "conversations.jsonl"}) as writer:
            writer.add(input_ids, loss_mask)

    What a killed writer left is removed by the next one; two at a time are refused. With `replace` a prepared data
    set of that name gives way to the new one, in one piece.

    Raises:
        DataError: the folder exists already, a sample is malformed, or no sample was added.
    """

    def __init__(
        self, folder: Path, source: dict[str, Any], rows_per_file: int = 64 * ROWS_PER_BATCH, *, replace: bool = False
    ) -> None:
        assert rows_per_file >= 1
        if folder.exists() and not replace:
            raise DataError(f"{folder}: needed a new folder, found one that exists (see --overwrite)")
        check_replaceable(folder)
        self.folder = folder
        self.num_samples = 0
        self._aside = folder.with_name(f".{folder.name}.partial")
        self._source = source
        self._rows_per_file = rows_per_file
        self._content = hashlib.sha256()
        self._rows: list[Sample] = []
        self._files: list[FileEntry] = []
        self._arrow: pa.ipc.RecordBatchFileWriter | None = None
        self._num_file_rows = self._num_tokens = self._num_supervised_tokens = self._max_length = 0

    def __enter__(self) -> Self:
        self._aside.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._aside, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise DataError(f"{self.folder}: needed no other writer, found one at work in {self._aside}") from None
        for path in self._aside.iterdir():  # of a killed writer
            path.unlink()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._aside, ignore_errors=True)
            os.close(self._lock)

    def add(self, input_ids: npt.ArrayLike, loss_mask: npt.ArrayLike, category: str = "") -> None:
        """Append one sample: token ids [n], 0/1 or bool [n], and what kind of prompt it is."""
        sample = Sample(np.asarray(input_ids, np.int32), np.asarray(loss_mask, np.bool_), category)
        self._check(sample)
        length = len(sample.input_ids)
        self._content.update(np.int64(length).tobytes() + sample.input_ids.tobytes() + sample.loss_mask.tobytes())
        self.num_samples += 1
        self._num_tokens += length
        self._num_supervised_tokens += int(sample.loss_mask.sum())
        self._max_length = max(self._max_length, length)
        self._rows.append(sample)
        self._num_file_rows += 1
        if len(self._rows) == ROWS_PER_BATCH or self._num_file_rows == self._rows_per_file:
            self._write_batch()

    def attach(self, name: str, content: bytes) -> None:
        """Put one more file beside the manifest."""
        with (self._aside / name).open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def _check(self, sample: Sample) -> None:
        input_ids, loss_mask, _ = sample
        where = f"{self.folder}: sample {self.num_samples}"
        if input_ids.ndim != 1 or input_ids.shape != loss_mask.shape:
            raise DataError(f"{where}: needed input_ids and loss_mask [n], found {input_ids.shape} and {loss_mask.shape}")
        if not input_ids.size:
            raise DataError(f"{where}: needed at least one token, found none")
        if input_ids.min() < 0:
            raise DataError(f"{where}: needed token ids from 0, found {input_ids.min()}")

    @property
    def _path(self) -> Path:
        return self._aside / f"data-{len(self._files):05}.arrow"

    def _write_batch(self) -> None:
        if self._arrow is None:
            self._arrow = pa.ipc.new_file(str(self._path), SCHEMA)
        self._arrow.write_batch(to_batch(self._rows))
        self._rows = []
        if self._num_file_rows == self._rows_per_file or self._path.stat().st_size >= MAX_FILE_BYTES:
            self._close_file()

    def _close_file(self) -> None:
        assert self._arrow is not None
        self._arrow.close()
        path, self._arrow = self._path, None
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            os.fsync(file.fileno())
        self._files.append(FileEntry(path.name, self._num_file_rows, path.stat().st_size, digest))
        self._num_file_rows = 0

    def _finish(self) -> None:
        if not self.num_samples:
            raise DataError(f"{self.folder}: needed at least one sample to write, found none")
        if self._rows:
            self._write_batch()
        if self._arrow is not None:
            self._close_file()
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            num_samples=self.num_samples,
            num_tokens=self._num_tokens,
            num_supervised_tokens=self._num_supervised_tokens,
            max_length=self._max_length,
            fingerprint=self._content.hexdigest(),
            files=self._files,
            source=self._source,
        )
        self.attach("manifest.json", encode_manifest(manifest))
        self._publish()

    def _publish(self) -> None:
        _fsync_folder(self._aside)
        check_replaceable(self.folder)
        former = self.folder.with_name(f".{self.folder.name}.former")
        shutil.rmtree(former, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(former)
        self._aside.rename(self.folder)
        _fsync_folder(self.folder.parent)
        shutil.rmtree(former, ignore_errors=True)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
