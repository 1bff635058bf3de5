"""Write a prepared data set (see common/data/dataset.py) in one piece."""

import fcntl
import hashlib
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from common.data.arrow_file import SCHEMA, Sample, to_batch
from common.data.manifest import SCHEMA_VERSION, FileEntry, Manifest, check_replaceable
from common.errors import DataError

ROWS_PER_BATCH = 1024
MAX_FILE_BYTES = 256 << 20


class DatasetWriter:
    """Writes a new data set aside and renames it when it is complete; after an error nothing is left.

        with DatasetWriter(folder, source={"input": "conversations.jsonl"}) as writer:
            writer.add(input_ids, loss_mask)

    Files of a killed writer are removed by the next one; two at a time are refused. With `replace` a prepared data
    set of that name gives way to the new one, in one piece.

    Raises:
        DataError: the folder exists already, a sample is malformed, or no sample was added.
    """

    def __init__(
        self, folder: Path, source: dict[str, Any], rows_per_file: int = 64 * ROWS_PER_BATCH, *, replace: bool = False
    ) -> None:
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
        """Append one sample: token ids [n], 0/1 or bool [n], and the kind of its prompt."""
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
        self.attach("manifest.json", msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
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
