"""A folder that is either wholly there under its name, on disk, or not there at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.errors import CheckpointError

ASIDE = ".partial"  # suffix of a folder that is being written, or being removed


@contextmanager
def durable_folder(folder: Path) -> Iterator[Path]:
    """Give an empty folder to fill; when the block ends it is on disk and bears the name `folder`.

    A folder of that name that was there before is replaced. Whatever goes wrong, nothing stays aside.

    Raises:
        CheckpointError: the disk is full or cannot be written; the message says why and what is free.
    """
    aside = folder.with_name(folder.name + ASIDE)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        _sync_contents(aside)
        remove_folder(folder)
        aside.rename(folder)
        _sync(folder.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        cause = _disk_error(error)
        if cause is None:
            raise
        raise CheckpointError(f"{folder}: not written: {cause.strerror}; {_free_space(folder)}") from error


def remove_folder(folder: Path) -> None:
    """Remove a folder in such a way that half of it is never seen under its name."""
    if folder.exists():
        leftover = folder.with_name(f".{folder.name}{ASIDE}")
        shutil.rmtree(leftover, ignore_errors=True)
        folder.rename(leftover)
        shutil.rmtree(leftover)


def remove_leftovers(parent: Path) -> None:
    """Remove what killed processes left aside in `parent`."""
    for leftover in parent.glob(f"*{ASIDE}"):
        shutil.rmtree(leftover)


def _sync_contents(folder: Path) -> None:
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_error(error: BaseException) -> OSError | None:
    """The OSError that an error is, or hides: `torch.save` turns "no space left" into a RuntimeError of its own."""
    link: BaseException | None = error if isinstance(error, OSError | RuntimeError) else None
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    return link


def _free_space(folder: Path) -> str:
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    return f"{shutil.disk_usage(existing).free} bytes are free in {existing}"
