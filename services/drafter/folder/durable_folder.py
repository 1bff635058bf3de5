"""A folder that is either wholly there under its name, on disk, or not there at all."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import run_dir
from common.errors import CheckpointError
from common.run_dir import ASIDE, sync


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
    """Remove a folder; it loses its name first, so nobody sees half of it."""
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


def _sync_contents(folder: Path) -> None:
    for path in folder.iterdir():
        sync(path)
    sync(folder)


def _raise_disk_error(path: Path, error: BaseException) -> None:
    cause = _disk_error(error)
    if cause:
        raise CheckpointError(f"{path}: not written: {cause.strerror}; {_free_space(path)}") from error


def _disk_error(error: BaseException) -> OSError | None:
    """Return the OSError behind an error: `torch.save` turns "no space left" into a RuntimeError of its own."""
    link: BaseException | None = error if isinstance(error, OSError | RuntimeError) else None
    while link is not None and not isinstance(link, OSError):
        link = link.__context__
    return link


def _free_space(folder: Path) -> str:
    existing = next(parent for parent in folder.absolute().parents if parent.exists())
    return f"{shutil.disk_usage(existing).free} bytes are free in {existing}"
