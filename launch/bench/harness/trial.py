"""A whole run as an experiment: started with faults, disturbed, and compared with an undisturbed one."""

import hashlib
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from common.actor.faults import Fault
from common.config import read
from common.metrics import read_metrics
from common.run_dir import actor_name, log_path
from launch.operate.report import read_series

CONFIG = Path(__file__).parents[2] / "configs" / "tiny.toml"
STALL_TIMEOUT_S = 3
QUICK = [f"supervision.stall_timeout_s={STALL_TIMEOUT_S}", "supervision.max_restarts=1000", "supervision.backoff_s=0.1"]
QUICK += ["supervision.max_deaths_without_progress=1000"]


class StepLine(NamedTuple):
    """The record that a drafter wrote of one optimizer step."""

    step: int
    time_s: float  # since the epoch
    loss: float
    grad_norm: float
    reduce_s: float
    skipped: bool


class Outcome(NamedTuple):
    """The result of a run."""

    exit_code: int
    losses: dict[int, float]
    acceptance: dict[int, float]
    weights: str  # SHA-256 of the exported file
    num_steps_repeated: int  # steps that the ranks made again, or that one made twice
    num_batches_again: int  # batches that targets computed more than once
    num_rejected: int  # slots with a wrong checksum or header
    longest_pause_s: float  # between two steps

    def equals(self, other: "Outcome") -> bool:
        """Return whether both runs trained alike, bit for bit."""
        return (self.losses, self.acceptance, self.weights) == (other.losses, other.acceptance, other.weights)


class Trial:
    """One run directory and the process that runs it: of tiny.toml, or of another file with its own supervision."""

    def __init__(
        self,
        run_dir: Path,
        overrides: list[str],
        faults: dict[str, list[Fault]] | None = None,
        config: Path | None = None,
    ) -> None:
        self.run_dir = run_dir
        self._path = config or CONFIG
        self._overrides = overrides if config else [*QUICK, *overrides]
        run_dir.mkdir(parents=True, mode=0o700)
        if faults:
            (run_dir / "faults.json").write_bytes(msgspec.json.encode(faults))

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the run, or start it again; what it prints goes to `<run>/output`."""
        command = [sys.executable, "-m", "launch.start_all", str(self._path), "--run-dir", str(self.run_dir)]
        with (self.run_dir / "output").open("ab") as output:
            return subprocess.Popen([*command, "--set", *self._overrides], stdout=output, stderr=output, cwd=CONFIG.parents[2])

    def output(self) -> str:
        """Return the end of what the run printed."""
        return (self.run_dir / "output").read_text(errors="replace")[-3000:]

    def pid(self, name: str) -> int | None:
        """Return the pid of an actor's latest incarnation, as its log says, or None before the first."""
        path = log_path(self.run_dir, name)
        pids = re.findall(r"started, pid (\d+)", path.read_text(errors="replace")) if path.exists() else []
        return int(pids[-1]) if pids else None

    def steps(self) -> list[StepLine]:
        """Return the records of all ranks, in order of time; [] before the run has begun."""
        if not (self.run_dir / "config.json").exists():
            return []
        ranks = range(read(self.run_dir).num_drafters)
        return sorted((line for rank in ranks for line in read_steps(self.run_dir, rank)), key=lambda line: line.time_s)

    def outcome(self, exit_code: int) -> Outcome:
        """Read the result of the run that ended."""
        run_dir, config = self.run_dir, read(self.run_dir)
        drafters = [actor_name("drafter", rank) for rank in range(config.num_drafters)]
        targets = [actor_name("target", index) for index in range(config.num_targets)]
        losses, evaluations = read_series(run_dir, config.num_drafters)
        steps = [[line.step for line in read_steps(run_dir, rank)] for rank in range(config.num_drafters)]
        batches = [line["batch"] for name in targets for line in read_metrics(run_dir, name)]
        export = run_dir / "export" / "model.safetensors"
        return Outcome(
            exit_code=exit_code,
            losses=losses,
            acceptance={step: line["acceptance"] for step, line in evaluations.items()},
            weights=hashlib.sha256(export.read_bytes()).hexdigest() if export.exists() else "",
            num_steps_repeated=max(len(numbers) - len(set(numbers)) for numbers in steps),
            num_batches_again=len(batches) - len(set(batches)),
            num_rejected=sum("rejected_batch" in line for name in drafters for line in read_metrics(run_dir, name)),
            longest_pause_s=longest_pause_s([line.time_s for line in self.steps()]),
        )

    def inconsistent_steps(self) -> list[int]:
        """Return steps of which two records, of whatever rank or incarnation, name different losses: there must be none."""
        losses: dict[int, set[str]] = {}
        for line in self.steps():
            losses.setdefault(line.step, set()).add(repr(line.loss))
        return sorted(step for step, found in losses.items() if len(found) > 1)


def read_steps(run_dir: Path, rank: int = 0) -> list[StepLine]:
    """Read the records of one rank, over all its incarnations; a figure that is not finite is nan."""
    lines = [line for line in read_metrics(run_dir, actor_name("drafter", rank)) if "loss" in line]
    return [StepLine._make(math.nan if line[name] is None else line[name] for name in StepLine._fields) for line in lines]


def longest_pause_s(times_s: list[float]) -> float:
    return max((after - before for before, after in itertools.pairwise(times_s)), default=0.0)
