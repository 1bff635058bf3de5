"""Every path in a run directory, and the files that appear there in one piece.

Files are written aside and renamed, so a concurrent reader sees the old content or the new one, never a part.
"""

import json
import os
from pathlib import Path
from typing import Any, Literal

import msgspec

from common.errors import ConfigError, HeadraceError

Role = Literal["exchange", "target", "drafter"]
_MAX_IPC_PATH_BYTES = 107  # sockaddr_un
ASIDE = ".partial"  # suffix of a file or folder that is not complete

# Files
LOCK = "lock"  # held by start_all while the run goes on
EXCHANGE_LOCK = "exchange.lock"  # held by the exchange while its socket is bound
CONFIG = "config.json"  # the settings with everything filled in; the only settings that actors read
FAULTS = "faults.json"  # faults that a test injects, see common/actor/faults.py
# Folders
DATA = "data"  # made-up data: train, eval
LOGS = "logs"
METRICS = "metrics"
CHECKPOINTS = "checkpoints"  # step-00000123/checkpoint.json and tensors
EXPORT = "export"  # the drafter in the format of the inference engines
QUARANTINE = "quarantine"  # records of steps that were not finite
RENDEZVOUS = "rendezvous"  # stores of torch.distributed, one file for each group
PROFILE = "profile"  # traces of torch.profiler


def actor_name(role: str, index: int) -> str:
    """Return `exchange`, `target-0`, `drafter-1`, ..."""
    return role if role == "exchange" else f"{role}-{index}"


def exchange_socket(run_dir: Path) -> Path:
    """Return the path of the exchange's socket, the only one between actors."""
    return run_dir.resolve() / "exchange.sock"


def exchange_address(run_dir: Path) -> str:
    """Return the address of the exchange; ConfigError if the path is too long for the kernel."""
    path = exchange_socket(run_dir)
    if len(str(path).encode()) > _MAX_IPC_PATH_BYTES:
        raise ConfigError(f"--run-dir: needed a path of at most {_MAX_IPC_PATH_BYTES} bytes with exchange.sock, found {path}")
    return f"ipc://{path}"


def control_path(run_dir: Path) -> Path:
    """Return the path of the supervisor's socket for operators."""
    return run_dir.resolve() / "control.sock"


def report_path(run_dir: Path) -> Path:
    """Return the path of the record of how the run ended; there is none while the run goes on."""
    return run_dir / "report.json"


def log_path(run_dir: Path, name: str) -> Path:
    """Return the log of an actor, shared by all its incarnations."""
    return run_dir / LOGS / f"{name}.log"


def metrics_path(run_dir: Path, name: str) -> Path:
    """Return the metrics of an actor, one JSON object per line."""
    return run_dir / METRICS / f"{name}.jsonl"


def fault_mark(run_dir: Path, name: str, index: int) -> Path:
    """Return the empty file that says that a fault of an actor has happened."""
    return run_dir / f"fault-{name}-{index}.happened"


def replace_file(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write or replace a file in one piece, `durable` on disk; an error leaves the old file and nothing aside."""
    aside = path.with_name(path.name + ASIDE)
    try:
        aside.write_bytes(content)
        if durable:
            sync(aside)
        aside.replace(path)
        if durable:
            sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Wait until a file or the entries of a folder are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write or replace a JSON file in one piece; null stands for a number that is not finite."""
    replace_file(path, msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


def read_object(path: Path, error: type[HeadraceError]) -> dict[str, Any]:
    """Read a JSON object that another program wrote; raise `error` if it cannot be read, is not JSON or is no object."""
    try:
        content = json.loads(path.read_text())
    except OSError as cause:
        raise error(f"{path}: cannot be read: {cause.strerror}") from cause
    except ValueError as cause:
        raise error(f"{path}: not JSON: {cause}") from cause
    if not isinstance(content, dict):
        raise error(f"{path}: needed an object, found {type(content).__name__}")
    return content
