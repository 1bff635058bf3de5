"""Runs of `launch.start_all` as subprocesses, their actors as processes of the machine, and what they leave on disk."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from common.metrics import read_metrics
from tests.builders.warm_start import WarmProcess

ROOT = Path(__file__).parent.parent.parent
CONFIG = ROOT / "launch" / "configs" / "tiny.toml"
SHORT = ["data.synthetic.num_samples=32", "data.synthetic.num_eval_samples=8", "plan.epochs=16", "evaluation.every_steps=24"]
SHORT += ["checkpoint.every_steps=8", "supervision.backoff_s=0.1", 'targets.devices=["cpu"]', 'drafters.devices=["cpu"]']
TWO_BY_TWO = ('targets.devices=["cpu", "cpu"]', 'drafters.devices=["cpu", "cpu"]')
DEADLINE_S = 120.0


class LaunchedRun:
    """One run directory and the latest `start_all` on it; by default one target, one drafter, some sixty steps."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stdout = self.stderr = ""
        self._stdout, self._stderr = (Path(f"{directory}.{name}") for name in ("stdout", "stderr"))
        self._process: subprocess.Popen[bytes] | WarmProcess | None = None

    def start(
        self, *overrides: str, config: Path = CONFIG, flags: tuple[str, ...] = (), is_cold: bool = torch.cuda.is_available()
    ) -> "LaunchedRun":
        """Start and return at once; later overrides win. A cold start does its imports itself, a warm one is a fork."""
        arguments = [str(config), "--run-dir", str(self.directory), *flags]
        settings = [*(SHORT if config == CONFIG else []), *overrides]
        arguments += ["--set", *settings] if settings else []
        self._stdout.unlink(missing_ok=True)
        self._stderr.unlink(missing_ok=True)
        if not is_cold:
            self._process = WarmProcess(arguments, ROOT, self._stdout, self._stderr)
            return self
        line = [sys.executable, "-m", "launch.start_all", *arguments]
        with self._stdout.open("wb") as stdout, self._stderr.open("wb") as stderr:
            self._process = subprocess.Popen(line, cwd=ROOT, stdout=stdout, stderr=stderr)
        return self

    def end(self) -> int:
        """Wait; return the exit code as `subprocess` gives it."""
        assert self._process is not None
        try:
            code = self._process.wait(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        self.stdout, self.stderr = self._stdout.read_text(), self._stderr.read_text()
        return code

    def signal(self, signum: signal.Signals) -> None:
        """Signal the supervisor."""
        assert self._process is not None
        self._process.send_signal(signum)

    def pids(self, name: str = "") -> list[int]:
        """Return the living processes of the run, or those of one actor such as `target-0`, by the file they print to."""
        printed = {pid: _target(Path(f"/proc/{pid}/fd/1")) for pid in _all_pids()}
        if name:
            return [pid for pid, path in printed.items() if path == str(self.directory / "logs" / f"{name}.log")]
        return [pid for pid, path in printed.items() if path.startswith(str(self.directory))]

    def pid(self, name: str) -> int:
        """The pid of an actor; waits where it is being restarted."""
        self.wait_until(lambda: bool(self.pids(name)))
        return self.pids(name)[0]

    def wait_for_step(self, step: int) -> None:
        """Return when the drafters reported that optimizer step."""
        self.wait_until(lambda: max(self.losses(), default=0) >= step)

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Poll; fails where the run ends first."""
        deadline = time.monotonic() + DEADLINE_S
        while not holds():
            assert self._process is not None
            assert self._process.poll() is None, self.log_tails()
            assert time.monotonic() < deadline, self.log_tails()
            time.sleep(0.01)

    def kill_what_is_left(self) -> None:
        """End the supervisor; its actors end with it."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def wait_until_gone(self, memory: set[tuple[int, int]]) -> None:
        """Return when no process of the run is left and nobody holds its memory."""
        deadline = time.monotonic() + DEADLINE_S
        while self.pids() or memory & open_files():
            assert time.monotonic() < deadline, self.pids()
            time.sleep(0.01)

    def losses(self, rank: int = 0) -> dict[int, float]:
        """Loss per optimizer step; a step done again after a restart must have had the same loss, bit for bit."""
        losses: dict[int, float] = {}
        for line in self._figures(rank):
            if "loss" in line:
                assert losses.setdefault(line["step"], line["loss"]) == line["loss"], line
        return losses

    def steps(self, rank: int = 0) -> list[int]:
        """The optimizer steps in the order in which they were reported."""
        return [line["step"] for line in self._figures(rank) if "loss" in line]

    def reported_s(self, rank: int = 0) -> list[float]:
        """When the optimizer steps were reported, in seconds since the epoch."""
        return [line["time_s"] for line in self._figures(rank) if "loss" in line]

    def evaluations(self) -> dict[int, float]:
        """Acceptance length per step before which it was measured."""
        return {line["step"]: line["acceptance"] for line in self._figures(0) if "acceptance" in line}

    def weights(self) -> bytes:
        """The exported draft model."""
        return (self.directory / "export" / "model.safetensors").read_bytes()

    def log(self, name: str) -> str:
        """All that an actor printed, over all its incarnations."""
        return (self.directory / "logs" / f"{name}.log").read_text()

    def logged_s(self, name: str, text: str) -> list[float]:
        """When an actor printed lines with this text, in seconds since the epoch."""
        lines = [line for line in self.log(name).splitlines() if text in line]
        return [datetime.strptime(line[:23], "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines]

    def num_incarnations(self, name: str) -> int:
        """Count the starts of an actor."""
        return len(re.findall(rf"---- {name} started, pid \d+ ----", self.log(name)))

    def log_tails(self) -> str:
        """For the message of a failed assertion."""
        return "\n".join(f"{path.name}: {path.read_text()[-1500:]}" for path in (self.directory / "logs").glob("*"))

    def skipped_steps(self, rank: int = 0) -> list[int]:
        """The steps that left the weights alone."""
        return [line["step"] for line in self._figures(rank) if line.get("skipped")]

    def _figures(self, rank: int) -> list[dict[str, Any]]:
        return list(read_metrics(self.directory, f"drafter-{rank}"))


def shared_memory(pid: int) -> dict[str, Path]:
    """The shared memory that an actor has open: its name -> its place under /proc."""
    links = ((link, _target(link)) for link in Path(f"/proc/{pid}/fd").iterdir())
    return {target.split(":")[1].split(" ")[0]: link for link, target in links if target.startswith("/memfd:headrace-")}


def identity(path: Path) -> tuple[int, int]:
    """Return device and inode, which identify a file, also one without a name."""
    status = path.stat()
    return status.st_dev, status.st_ino


def open_files() -> set[tuple[int, int]]:
    """The identities of all files that any process of the machine has open."""
    found = set()
    for pid in _all_pids():
        try:
            found |= {identity(link) for link in Path(f"/proc/{pid}/fd").iterdir() if link.exists()}
        except OSError:
            continue  # it ended
    return found


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""  # closed since it was listed


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit() and int(entry.name) != os.getpid()]
