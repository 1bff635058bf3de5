"""Metrics over time: `<run>/metrics/<actor>.jsonl`, one JSON object per line, whole lines only."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from common.errors import DataError
from common.run_dir import metrics_path

_NUM_SHOWN_BYTES = 40


class MetricsWriter:
    """Appends to one actor's file; a line is one write, so a kill never mixes two lines."""

    def __init__(self, run_dir: Path, name: str) -> None:
        path = metrics_path(run_dir, name)
        path.parent.mkdir(exist_ok=True)
        _end_torn_line(path)
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, **figures: Any) -> None:
        """Append one object; null stands for a number that is not finite."""
        os.write(self._fd, msgspec.json.encode(figures) + b"\n")


def read_metrics(run_dir: Path, name: str) -> Iterator[dict[str, Any]]:
    """Yield the objects of one actor's file, oldest first; a line torn by a kill is left out.

    Raises:
        DataError: a line was never the beginning of an object.
    """
    path = metrics_path(run_dir, name)
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line and not line.startswith(b"{"):
            raise DataError(f"{path}: line {number}: needed a JSON object, found {line[:_NUM_SHOWN_BYTES]!r}")
        with suppress(msgspec.DecodeError):
            yield msgspec.json.decode(line, type=dict[str, Any])


def _end_torn_line(path: Path) -> None:
    if path.exists() and (data := path.read_bytes()) and not data.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
