"""The log of an actor: renamed where it has grown too large, read from its end, followed."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_MAX_BYTES = 16 * 1024 * 1024
_POLL_S = 0.2
_STAMP = re.compile(r"^\d{4}-\S+ \S+ [A-Z] ")


def rotate(path: Path, max_bytes: int = _MAX_BYTES) -> None:
    """Rename a log that is too large to NAME.log.1. Call between two incarnations, when nobody writes to it."""
    if path.exists() and path.stat().st_size > max_bytes:
        path.replace(path.with_suffix(".log.1"))


def last_lines(path: Path, count: int) -> list[str]:
    """Return the end of a log; [] where there is none."""
    try:
        return path.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def last_message(path: Path) -> str:
    """Return the last line of a log without its date, time and level; "" where there is none."""
    return _STAMP.sub("", "".join(last_lines(path, 1)))


def follow(path: Path, position: int) -> Iterator[str]:
    """Yield without end the text that is written from byte `position` on, "" while there is none.

    A log that was renamed is read to its end before its successor under the same name.
    """
    while True:
        with path.open("rb") as log:
            log.seek(position)
            is_renamed, new = False, b""
            while new or not is_renamed:
                is_renamed, new = _is_renamed(path, log), log.read()
                yield new.decode(errors="replace")
                if not new:
                    time.sleep(_POLL_S)
        position = 0


def _is_renamed(path: Path, log: BinaryIO) -> bool:
    try:
        return not os.path.samestat(path.stat(), os.fstat(log.fileno()))
    except FileNotFoundError:  # its successor does not exist yet
        return False
