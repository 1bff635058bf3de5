"""The directory of a run: what may stand in it, and the lock that makes it one run's own."""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from common.actor import faults
from common.errors import ConfigError, RunDirectoryBusyError
from common.run_dir import (
    CHECKPOINTS,
    CONFIG,
    DATA,
    EXCHANGE_LOCK,
    EXPORT,
    FAULTS,
    LOCK,
    LOGS,
    METRICS,
    PROFILE,
    QUARANTINE,
    RENDEZVOUS,
    control_path,
    exchange_socket,
    log_path,
    metrics_path,
    report_path,
)
from launch.operate.summary import read_series
from launch.operate.topology import ActorSpec

_FOLDERS = (DATA, LOGS, METRICS, CHECKPOINTS, EXPORT, QUARANTINE, RENDEZVOUS, PROFILE)
_FILES = (LOCK, EXCHANGE_LOCK, CONFIG, FAULTS, "damaged.json")
_Test = Callable[[int], bool]


def check_run_dir(run_dir: Path, actors: list[ActorSpec]) -> None:
    """Look at all that a run reads or writes in its directory, and touch nothing.

    Raises:
        ConfigError: something is of another kind than the run makes it.
        DataError: the figures of an earlier start hold what no drafter has written.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run-dir: needed a directory to write to, found the file {run_dir}")
    for name in _FOLDERS:
        _check_kind(run_dir / name, stat.S_ISDIR, "a folder")
    logs = [log_path(run_dir, actor.name) for actor in actors]
    metrics = [metrics_path(run_dir, actor.name) for actor in actors]
    for path in (*(run_dir / name for name in _FILES), report_path(run_dir), *logs, *metrics):
        _check_kind(path, stat.S_ISREG, "a file")
    for path in (control_path(run_dir), exchange_socket(run_dir)):
        _check_kind(path, stat.S_ISSOCK, "a socket")
    faults.read(run_dir)
    read_series(run_dir, sum(actor.role == "drafter" for actor in actors))


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Make the directory where it is not there, and hold its lock for the time of the block.

    Raises:
        ConfigError: it cannot be made or written to.
        RunDirectoryBusyError: another run holds it.
    """
    fd = _open_lock(run_dir)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryBusyError(f"--run-dir: needed a directory of no other run, found {run_dir} locked") from None
        yield
    finally:
        os.close(fd)


def _open_lock(run_dir: Path) -> int:
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(run_dir / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--run-dir: needed a directory to write to, found {run_dir}: {error.strerror}") from error


def _check_kind(path: Path, is_kind: _Test, needed: str) -> None:
    """A link counts as the thing that it leads to; one that leads nowhere is of no kind."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if os.path.lexists(path) or not isinstance(error, FileNotFoundError):
            raise ConfigError(f"{path}: needed {needed}: {error.strerror}") from error
        return
    if not is_kind(mode):
        raise ConfigError(f"{path}: needed {needed}, found {_name_kind(mode)}")


def _name_kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe"}
    return kinds.get(stat.S_IFMT(mode), "a device")
