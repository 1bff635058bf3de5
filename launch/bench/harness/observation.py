"""A run while it goes on, seen from outside: its own status, the memory of its processes, the lines of its metrics."""

import math
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common.metrics import read_metrics
from launch.control import Operator
from launch.operate.control_messages import Kill, RunStatus

_LOOK_S = 0.25
_TAIL = 3000  # characters
_NO_DURATIONS = {"time_s", "tokens_per_s"}


class Look(NamedTuple):
    """One moment of a run."""

    time_s: float  # since the epoch
    status: RunStatus
    memory_mib: dict[str, float]  # resident, without shared memory, by actor
    pids: dict[str, int]


class StepLine(NamedTuple):
    """What a drafter wrote of one optimizer step."""

    step: int
    time_s: float  # since the epoch
    loss: float
    grad_norm: float
    reduce_s: float
    skipped: bool


class Observation:
    """Looks at a run several times a second while something is waited for."""

    def __init__(self, process: "subprocess.Popen[bytes]", run_dir: Path) -> None:
        self.run_dir = run_dir
        self.looks: list[Look] = []
        self._process = process
        self._operator: Operator | None = None

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Look until `holds`.

        Raises:
            RuntimeError: the run ended, or the time is over; the end of what it printed is in the message.
        """
        deadline = time.monotonic() + timeout_s
        while not holds():
            if self._process.poll() is not None or time.monotonic() > deadline:
                printed = (self.run_dir / "output").read_text(errors="replace")[-_TAIL:]
                raise RuntimeError(f"the run {'hangs' if self._process.poll() is None else 'ended'}:\n{printed}")
            self._look()
            time.sleep(_LOOK_S)

    def watch(self, duration_s: float) -> None:
        """Look for so long."""
        until = time.monotonic() + duration_s
        self.wait_until(lambda: time.monotonic() >= until, duration_s + 60)

    def kill(self, name: str) -> float:
        """Kill an actor as an operator; returns the time."""
        killed_s = time.time()
        assert self._operator is not None
        self._operator.ask(Kill(name))
        return killed_s

    def close(self) -> None:
        """Hang up."""
        if self._operator is not None:
            self._operator.close()

    def steps(self) -> list[StepLine]:
        """What the first drafter wrote of its steps, over all its lives."""
        return read_steps(self.run_dir)

    def medians_s(self, name: str, start_s: float, end_s: float) -> dict[str, float]:
        """The median of every duration that an actor wrote in a time."""
        lines = [line for line in read_metrics(self.run_dir, name) if start_s <= line.get("time_s", 0.0) <= end_s]
        keys = {key for line in lines for key in line if key.endswith("_s") and key not in _NO_DURATIONS}
        return {key: statistics.median(line.get(key) or 0.0 for line in lines) for key in sorted(keys)}

    def between(self, start_s: float, end_s: float) -> list[Look]:
        """The looks of a time."""
        return [look for look in self.looks if start_s <= look.time_s <= end_s]

    def _look(self) -> None:
        if self._operator is None:
            if not (self.run_dir / "control.sock").exists():
                return
            self._operator = Operator(self.run_dir)
        status = self._operator.status()
        pids = {actor.name: actor.pid for actor in status.actors if actor.pid is not None}
        memory_mib = {name: _memory_mib(pid) for name, pid in pids.items()}
        self.looks.append(Look(time.time(), status, memory_mib, pids))


def read_steps(run_dir: Path) -> list[StepLine]:
    """What the first drafter of a run wrote of its steps, over all its lives; a loss that is not finite is nan."""
    lines = [line for line in read_metrics(run_dir, "drafter-0") if "loss" in line]
    return [StepLine._make(math.nan if line[name] is None else line[name] for name in StepLine._fields) for line in lines]


def _memory_mib(pid: int) -> float:
    """Resident memory of a process that is not shared with others; 0 where it has ended."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return float(fields["RssAnon"].split()[0]) / 1024
    except (OSError, KeyError):
        return 0.0
