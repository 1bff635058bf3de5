"""Where the things of a run are: actor names, files in the run directory, the exchange's socket."""

from pathlib import Path
from typing import Literal

from common.errors import ConfigError

Role = Literal["exchange", "target", "drafter"]
_MAX_IPC_PATH_BYTES = 107  # sockaddr_un


def actor_name(role: str, index: int) -> str:
    """`exchange`, `target-0`, `drafter-1`, ..."""
    return role if role == "exchange" else f"{role}-{index}"


def exchange_address(run_dir: Path) -> str:
    """The only bound socket of a run; ConfigError where the path is too long for the kernel."""
    path = run_dir.resolve() / "exchange.sock"
    if len(str(path).encode()) > _MAX_IPC_PATH_BYTES:
        raise ConfigError(f"--run-dir: needed a path of at most {_MAX_IPC_PATH_BYTES} bytes with exchange.sock, found {path}")
    return f"ipc://{path}"


def control_path(run_dir: Path) -> Path:
    """The supervisor's socket, for operators."""
    return run_dir.resolve() / "control.sock"


def report_path(run_dir: Path) -> Path:
    """How the run ended; not there while one is alive."""
    return run_dir / "report.json"


def log_path(run_dir: Path, name: str) -> Path:
    """All that an actor prints, over all its lives."""
    return run_dir / "logs" / f"{name}.log"


def metrics_path(run_dir: Path, name: str) -> Path:
    """One JSON object per line."""
    return run_dir / "metrics" / f"{name}.jsonl"
