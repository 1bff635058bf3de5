"""Read a prepared data set: token ids and loss masks in memory-mapped Arrow files, with a manifest.

    <folder>/manifest.json      number, sizes and checksums of the files, checked when opened
    <folder>/data-00000.arrow   Arrow IPC file format, see common/data/arrow_file.py

One row is one sample; the sample id is the row's number over all files. A folder that Hugging Face
`datasets` saved is read as it is.
"""

import bisect
import itertools
from pathlib import Path
from typing import Self

import numpy as np
import pyarrow as pa

from common.data.arrow_file import ArrowFile, Int32Array, Sample
from common.data.manifest import Manifest, read_manifest
from common.data.saved_dataset import describe_saved_dataset, is_saved_dataset
from common.errors import DataError


class Dataset:
    """Read access. Opening reads the manifest only; each Arrow file is mapped when first needed."""

    def __init__(self, folder: Path, manifest: Manifest, files: list[ArrowFile] | None = None) -> None:
        self.folder = folder
        self.manifest = manifest
        self._ends = list(itertools.accumulate(entry.num_rows for entry in manifest.files))
        self._files: list[ArrowFile | None] = list(files) if files else [None] * len(manifest.files)

    @classmethod
    def open(cls, folder: Path, *, damaged: bool = False) -> Self:
        """Check the manifest and, unless `damaged`, the sizes of the files it names.

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
        num_rows = dataset._ends[-1] if dataset._ends else 0
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
        """Return the SHA-256 of all samples in order, whatever files they are cut into."""
        return self.manifest.fingerprint

    @property
    def lengths(self) -> Int32Array:
        """Return int32 [num_samples], tokens per sample, without touching the tokens. DataError as `read`."""
        return np.concatenate([self._open_file(file).lengths() for file in range(len(self._ends))])

    @property
    def categories(self) -> list[str]:
        """Return the category of every sample, "" where it has none. DataError as `read`."""
        return [category for file in range(len(self._ends)) for category in self._open_file(file).categories()]

    def rows_of(self, file: int) -> range:
        """Return the ids of the samples in a file."""
        return range(self._ends[file] - self.manifest.files[file].num_rows, self._ends[file])

    def read(self, sample_id: int) -> Sample:
        """Return a copy of one sample. DataError where it or its file is damaged; the message names file and rows."""
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
                self.read(sample)  # a damaged row is an error of its own
                return sample, found[1]
        return None

    def has_supervised_token(self) -> bool:
        """Return whether there is anything to learn; reads masks only where the manifest does not say. DataError as `read`."""
        if self.manifest.num_supervised_tokens is not None:
            return self.manifest.num_supervised_tokens > 0
        return any(self._open_file(file).has_supervised_token() for file in range(len(self._ends)))

    def check_size(self, file: int) -> None:
        """Raise DataError where a file is missing or of another size than the manifest says."""
        entry = self.manifest.files[file]
        path = self.folder / entry.name
        found = f"{path.stat().st_size}" if path.is_file() else "none"
        if found != f"{entry.num_bytes}":
            needed = f"{entry.num_bytes} bytes" if path.is_file() else f"a file of {entry.num_bytes} bytes"
            raise DataError(f"{self._name(file)}: needed {needed}, found {found}")

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
