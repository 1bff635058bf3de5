"""Which rows of a data set cannot be trusted, found once at the start of a run that is told to go on without them."""

import hashlib
from pathlib import Path

import msgspec
import numpy as np

from common.data.arrow_file import Int32Array
from common.data.dataset import Dataset
from common.errors import DataError

Ranges = list[tuple[int, int]]  # first row, and the row after the last


class Damage(msgspec.Struct, frozen=True):
    """What is wrong with a file, and the rows it makes unusable: none, some or all of the file's."""

    file: str
    found: str
    rows: Ranges

    def __str__(self) -> str:
        rows = ", ".join(f"{start} to {stop - 1}" for start, stop in self.rows)
        return f"{self.file}: {self.found}; {f'unusable rows: {rows}' if rows else 'every row is intact'}"


class DamagedRows(msgspec.Struct, frozen=True):
    """The unusable rows of the data sets of a run, as start_all found them."""

    train: Ranges = []
    held_out: dict[str, Ranges] = {}  # by name of the evaluation set


def find_damage(folder: Path) -> list[Damage]:
    """Compare every file of a data set with its size and its SHA-256; of those that differ, check every row.

    Raises:
        DataError: no data set, or one whose damage leaves even the number of its rows open.
    """
    dataset = Dataset.open(folder, damaged=True)
    found = [_examine(dataset, file) for file in range(len(dataset.manifest.files))]
    return [damage for damage in found if damage is not None]


def write_damaged_rows(rows: DamagedRows, run_dir: Path) -> None:
    """Leave them where the exchange looks."""
    aside = run_dir / "damaged.json.new"
    aside.write_bytes(msgspec.json.encode(rows))
    aside.replace(run_dir / "damaged.json")


def read_damaged_rows(run_dir: Path) -> DamagedRows:
    """As `write_damaged_rows` left them."""
    return msgspec.json.decode((run_dir / "damaged.json").read_bytes(), type=DamagedRows)


def usable_lengths(dataset: Dataset, damaged: Ranges) -> Int32Array:
    """int32 [num_samples], tokens per sample; 0 for a damaged one. Files without a usable row are not opened.

    Raises:
        DataError: no row is left.
    """
    usable = np.ones(dataset.num_samples, np.bool_)
    for start, stop in damaged:
        usable[start:stop] = False
    if not usable.any():
        raise DataError(f"{dataset.folder}: needed at least one row that is not damaged, found none")
    lengths = np.zeros(dataset.num_samples, np.int32)
    for file in range(len(dataset.manifest.files)):
        rows = dataset.rows_of(file)
        span = slice(rows.start, rows.stop)
        if usable[span].any():
            lengths[span] = dataset.file_lengths(file) * usable[span]
    return lengths


def usable_fingerprint(dataset: Dataset, damaged: Ranges) -> str:
    """Names the samples that are left: the data set's own where none is damaged."""
    if not damaged:
        return dataset.fingerprint
    return hashlib.sha256(msgspec.json.encode([dataset.fingerprint, damaged])).hexdigest()


def _examine(dataset: Dataset, file: int) -> Damage | None:
    entry = dataset.manifest.files[file]
    try:
        dataset.check_size(file)
        found = _compare(dataset.folder / entry.name, entry.sha256)
        if not found:
            return None
        rows = [row for row in dataset.rows_of(file) if not _is_intact(dataset, row)]
        return Damage(entry.name, found, _to_ranges(rows))
    except DataError as error:
        rows_of_file = dataset.rows_of(file)
        return Damage(entry.name, str(error).rpartition("): ")[2], [(rows_of_file.start, rows_of_file.stop)])


def _compare(path: Path, sha256: str) -> str:
    """What is wrong; "" where nothing is, or where no checksum is known."""
    if not sha256:
        return ""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    return "" if found == sha256 else f"needed SHA-256 {sha256[:12]}, found {found[:12]}"


def _is_intact(dataset: Dataset, row: int) -> bool:
    try:
        dataset.read(row)
    except DataError:
        return False
    return True


def _to_ranges(rows: list[int]) -> Ranges:
    ranges: Ranges = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges
