"""A folder that is either complete on disk under its name, or not there at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import run_dir
from common.errors import CheckpointError
from common.run_dir import ASIDE, sync


@contextmanager
def durable_folder(folder: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends it is on disk and replaces `folder`. An error leaves nothing aside.

    Raises:
        CheckpointError: the disk is full or cannot be written; the message says why and how much is free.
    """
    aside = folder.with_name(folder.name + ASIDE)
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        yield aside
        for path in (*aside.iterdir(), aside):
            sync(path)
        old = _set_aside(folder)
        aside.rename(folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        _raise_disk_error(folder, error)
        raise


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file inside a folder that is there already; CheckpointError if the disk refuses, and the old file stays."""
    try:
        run_dir.replace_file(path, content, durable=True)
    except OSError as error:
        _raise_disk_error(path, error)
        raise


def remove_folder(folder: Path) -> None:
    """Remove a folder; it is renamed first, so that no reader finds half of it."""
    shutil.rmtree(_set_aside(folder), ignore_errors=True)


def remove_leftovers(parent: Path) -> None:
    """Remove partial folders and files of killed processes, in `parent` and in the folders there."""
    for leftover in parent.glob(f"*{ASIDE}"):
        shutil.rmtree(leftover)
    for leftover in parent.glob(f"*/*{ASIDE}"):
        leftover.unlink()


def _set_aside(folder: Path) -> Path:
    """Rename a folder, if there is one; returns its new path."""
    aside = folder.with_name(f".{folder.name}{ASIDE}")
    shutil.rmtree(aside, ignore_errors=True)
    if folder.exists():
        folder.rename(aside)
    return aside


def _raise_disk_error(path: Path, error: BaseException) -> None:
    """Raise CheckpointError if an OSError is behind `error`: `torch.save` turns "no space left" into a RuntimeError."""
    cause: BaseException | None = error if isinstance(error, OSError | RuntimeError) else None
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__context__
    if cause is not None:
        existing = next(parent for parent in path.absolute().parents if parent.exists())
        free = f"{shutil.disk_usage(existing).free} bytes are free in {existing}"
        raise CheckpointError(f"{path}: not written: {cause.strerror}; {free}") from error
