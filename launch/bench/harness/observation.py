"""A run seen from outside while it goes on: its own status, the memory of its processes, the lines of its metrics."""

import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from common.metrics import read_metrics
from launch.bench.harness.trial import StepLine, Trial, read_steps
from launch.control import Operator
from launch.operate.control_messages import Kill, RunStatus

_INTERVAL_S = 0.25
_NO_DURATIONS = {"time_s", "tokens_per_s"}


class Sample(NamedTuple):
    """One moment of a run."""

    time_s: float  # since the epoch
    status: RunStatus
    memory_mib: dict[str, float]  # resident, without shared memory, by actor
    pids: dict[str, int]


class Observation:
    """Starts a run and samples it several times a second while something is waited for."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self.samples: list[Sample] = []
        self._process = trial.start()
        self._operator: Operator | None = None

    def wait_until(self, holds: Callable[[], bool], timeout_s: float) -> None:
        """Sample the run until `holds` returns True.

        Raises:
            RuntimeError: the run ended, or the time is over; the end of what it printed is in the message.
        """
        deadline = time.monotonic() + timeout_s
        while not holds():
            has_ended = self._process.poll() is not None
            if has_ended or time.monotonic() > deadline:
                raise RuntimeError(f"the run {'ended' if has_ended else 'hangs'}:\n{self.trial.output()}")
            self._take_sample()
            time.sleep(_INTERVAL_S)

    def watch(self, duration_s: float) -> None:
        until = time.monotonic() + duration_s
        self.wait_until(lambda: time.monotonic() >= until, duration_s + 60)

    def await_step(self, step: int, timeout_s: float) -> None:
        self.wait_until(lambda: any(line.step >= step for line in self.steps()[-1:]), timeout_s)

    def kill(self, name: str) -> float:
        """Kill an actor as an operator; return the time."""
        killed_s = time.time()
        assert self._operator is not None
        self._operator.ask(Kill(name))
        return killed_s

    def end(self) -> None:
        """End the run at once."""
        self._process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        if self._operator is not None:
            self._operator.close()

    def steps(self) -> list[StepLine]:
        """Return the records of the first drafter."""
        return read_steps(self.trial.run_dir)

    def medians_s(self, name: str, start_s: float, end_s: float) -> dict[str, float]:
        """Return the median of every duration that an actor wrote in a time."""
        lines = [line for line in read_metrics(self.trial.run_dir, name) if start_s <= line.get("time_s", 0.0) <= end_s]
        keys = {key for line in lines for key in line if key.endswith("_s") and key not in _NO_DURATIONS}
        return {key: statistics.median(line.get(key) or 0.0 for line in lines) for key in sorted(keys)}

    def between(self, start_s: float, end_s: float) -> list[Sample]:
        return [sample for sample in self.samples if start_s <= sample.time_s <= end_s]

    def _take_sample(self) -> None:
        if self._operator is None:
            if not (self.trial.run_dir / "control.sock").exists():
                return
            self._operator = Operator(self.trial.run_dir)
        status = self._operator.status()
        pids = {actor.name: actor.pid for actor in status.actors if actor.pid is not None}
        memory_mib = {name: _memory_mib(pid) for name, pid in pids.items()}
        self.samples.append(Sample(time.time(), status, memory_mib, pids))


def _memory_mib(pid: int) -> float:
    """Return the resident memory of a process that is not shared with others; 0 if it has ended."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        return float(fields["RssAnon"].split()[0]) / 1024
    except (OSError, KeyError):
        return 0.0
