"""The log of an actor: limited in size while the actor writes on, read from its end, followed."""

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

MAX_BYTES = 16 * 1024 * 1024
_POLL_S = 0.2
_STAMP = re.compile(r"^\d{4}-\S+ \S+ [A-Z] ")
_HEADER = re.compile(rb"^.*---- \S+ started, pid \d+ ----$", re.MULTILINE)


def predecessor(path: Path) -> Path:
    """Where what no longer fits into a log is kept."""
    return path.with_suffix(".log.1")


def limit(path: Path, max_bytes: int = MAX_BYTES) -> None:
    """Make a log that has grown too large the predecessor, and go on with the header line of the current life.

    The writers have the file open to append, so it is copied and cut; what they write in between is lost.
    """
    if not path.exists() or path.stat().st_size <= max_bytes:
        return
    header = (_HEADER.findall(path.read_bytes()) or [b""])[-1]
    aside = path.with_suffix(".log.new")
    with path.open("r+b") as log, aside.open("wb") as copy:
        shutil.copyfileobj(log, copy)
        log.truncate(0)
    aside.replace(predecessor(path))
    with path.open("ab") as log:
        log.write(header + b"\n" if header else b"")


def last_lines(path: Path, count: int) -> list[str]:
    """The end of a log; [] where there is none."""
    try:
        return path.read_text(errors="replace").splitlines()[-count:]
    except OSError:
        return []


def last_message(path: Path) -> str:
    """Return the last line of a log without its date, time and level; "" where there is none."""
    return _STAMP.sub("", "".join(last_lines(path, 1)))


def follow(path: Path, position: int) -> Iterator[str]:
    """What is written from byte `position` on, for ever, over every cut; "" where there is nothing new."""
    while True:
        size = path.stat().st_size if path.exists() else 0
        if size < position:
            yield _read(predecessor(path), position).decode(errors="replace")
            position = 0
        new = _read(path, position)
        position += len(new)
        yield new.decode(errors="replace")
        if not new:
            time.sleep(_POLL_S)


def _read(path: Path, position: int) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as log:
        log.seek(position)
        return log.read()
