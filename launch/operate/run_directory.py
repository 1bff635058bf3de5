"""The directory of a run: checked before it is touched, locked by one run, resumed under the settings that made it."""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from common import config as configuration
from common import run_dir as paths
from common.actor import faults
from common.config import Config
from common.errors import CheckpointError, ConfigError, RunDirectoryBusyError
from launch.operate.report import read_series
from launch.operate.topology import ActorSpec

_FOLDERS = (
    paths.DATA,
    paths.LOGS,
    paths.METRICS,
    paths.CHECKPOINTS,
    paths.EXPORT,
    paths.QUARANTINE,
    paths.RENDEZVOUS,
    paths.PROFILE,
)
_FILES = (paths.LOCK, paths.EXCHANGE_LOCK, paths.CONFIG, paths.FAULTS)
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFREG: "a file", stat.S_IFSOCK: "a socket", stat.S_IFIFO: "a pipe"}
_FIXED = ("model", "draft", "data", "plan", "evaluation")  # targets, drafters, ring and training settings may change
_MAY_MOVE = ("draft.init",)  # its contents are compared


def check_run_dir(run_dir: Path, actors: list[ActorSpec]) -> None:
    """Check all that a run reads or writes in its directory, and change nothing.

    Raises:
        ConfigError: something is of another kind than the run makes it.
        DataError: the metrics of an earlier start hold records that no drafter has written.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run-dir: needed a directory to write to, found the file {run_dir}")
    for name in _FOLDERS:
        _check_kind(run_dir / name, stat.S_ISDIR, "a folder")
    of_actors = [path(run_dir, actor.name) for actor in actors for path in (paths.log_path, paths.metrics_path)]
    for path in (*(run_dir / name for name in _FILES), paths.report_path(run_dir), *of_actors):
        _check_kind(path, stat.S_ISREG, "a file")
    for path in (paths.control_path(run_dir), paths.exchange_socket(run_dir)):
        _check_kind(path, stat.S_ISSOCK, "a socket")
    faults.read(run_dir)
    read_series(run_dir, sum(actor.role == "drafter" for actor in actors))


@contextmanager
def lock_run_dir(run_dir: Path) -> Iterator[None]:
    """Create the directory if needed, and hold its lock for the time of the block.

    Raises:
        ConfigError: it cannot be made or written to.
        RunDirectoryBusyError: another run holds it.
    """
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(run_dir / paths.LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--run-dir: needed a directory to write to, found {run_dir}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirectoryBusyError(f"--run-dir: needed a directory of no other run, found {run_dir} locked") from None
        yield
    finally:
        os.close(fd)


def check_resume(config: Config, run_dir: Path) -> None:
    """Compare with the configuration that the checkpoints of the directory were made under, if there are any.

    Raises:
        CheckpointError: a setting differs that decides batches, draft model or hidden states; both values are named.
    """
    if not any((run_dir / paths.CHECKPOINTS).glob("step-????????")) or not (run_dir / paths.CONFIG).exists():
        return  # the checkpoints name the batches and the draft model, which the drafters compare
    earlier = configuration.read(run_dir)
    pairs = {"seed": (earlier.seed, config.seed)}
    for table in _FIXED:
        before, now = (msgspec.structs.asdict(getattr(side, table)) for side in (earlier, config))
        pairs |= {f"{table}.{key}": (before[key], now[key]) for key in before}
    for key, (needed, found) in pairs.items():
        if needed != found and key not in _MAY_MOVE:
            raise CheckpointError(f"{key}: needed {needed}, as the checkpoints in {run_dir} have it, found {found}")


def _check_kind(path: Path, is_kind: Callable[[int], bool], needed: str) -> None:
    """Check a path that may not exist. A link counts as its target; one that leads nowhere is of no kind."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if os.path.lexists(path) or not isinstance(error, FileNotFoundError):
            raise ConfigError(f"{path}: needed {needed}: {error.strerror}") from error
        return
    if not is_kind(mode):
        raise ConfigError(f"{path}: needed {needed}, found {_KINDS.get(stat.S_IFMT(mode), 'a device')}")
