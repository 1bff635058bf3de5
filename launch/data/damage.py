"""Find the files of a prepared data set that are not as they were written, and the rows they make unusable."""

import hashlib
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from common.data.dataset import Dataset
from common.errors import DataError

Ranges = list[tuple[int, int]]  # first row, and the row after the last


class Damage(NamedTuple):
    """The difference that was found in a file, and the rows it makes unusable: none, some or all of the file's."""

    file: str
    found: str
    rows: Ranges

    def __str__(self) -> str:
        rows = ", ".join(f"{start} to {stop - 1}" for start, stop in self.rows)
        return f"{self.file}: {self.found}; {f'unusable rows: {rows}' if rows else 'every row is intact'}"


def find_damage(dataset: Dataset) -> list[Damage]:
    """Compare every file of a data set with its size and its SHA-256; of those that differ, check every row."""
    found = [_examine(dataset, file) for file in range(len(dataset.manifest.files))]
    return [damage for damage in found if damage is not None]


def _examine(dataset: Dataset, file: int) -> Damage | None:
    entry, rows = dataset.manifest.files[file], dataset.rows_of(file)
    try:
        dataset.check_size(file)
        found = _compare(dataset.folder / entry.name, entry.sha256)
        return Damage(entry.name, found, _to_ranges([row for row in rows if not _is_intact(dataset, row)])) if found else None
    except DataError as error:
        return Damage(entry.name, str(error).rpartition("): ")[2], [(rows.start, rows.stop)])


def _compare(path: Path, sha256: str) -> str:
    """Return the difference; "" where there is none, or where no checksum is known."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest() if sha256 else ""
    return "" if found == sha256 else f"needed SHA-256 {sha256[:12]}, found {found[:12]}"


def _is_intact(dataset: Dataset, row: int) -> bool:
    try:
        dataset.read(row)
    except DataError:
        return False
    return True


def _to_ranges(rows: list[int]) -> Ranges:
    runs = [list(run) for _, run in groupby(enumerate(rows), key=lambda item: item[1] - item[0])]
    return [(run[0][1], run[-1][1] + 1) for run in runs]
