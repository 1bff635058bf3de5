"""A whole run as an experiment: started with faults, disturbed, and compared with an undisturbed one."""

import hashlib
import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec

from common.actor.faults import Fault
from common.config import Config, read
from common.metrics import read_metrics
from common.run_dir import actor_name, log_path
from launch.operate.report import read_series

CONFIG = Path(__file__).parents[2] / "configs" / "tiny.toml"
QUICK = ["supervision.stall_timeout_s=3", "supervision.max_restarts=1000", "supervision.backoff_s=0.1"]
QUICK += ["supervision.max_deaths_without_progress=1000"]


class Outcome(NamedTuple):
    """What a run came to."""

    exit_code: int
    losses: dict[int, float]
    acceptance: dict[int, float]
    weights: str  # SHA-256 of the exported file
    num_steps_repeated: int  # steps that the ranks made again, or that one made twice
    num_batches_again: int  # batches that targets computed more than once
    num_rejected: int  # slots with a wrong checksum or header
    longest_pause_s: float  # between two steps

    def equals(self, other: "Outcome") -> bool:
        """The same training, bit for bit."""
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

    def pid(self, name: str) -> int | None:
        """The latest life of an actor, as its log says, or None before the first."""
        path = log_path(self.run_dir, name)
        lives = re.findall(r"started, pid (\d+)", path.read_text(errors="replace")) if path.exists() else []
        return int(lives[-1]) if lives else None

    def steps(self) -> list[tuple[float, int]]:
        """(time, step) of every line that a drafter wrote of a step, in order of time."""
        lines = [line for rank in range(self._config().num_drafters) for line in read_metrics(self.run_dir, f"drafter-{rank}")]
        return sorted((line["time_s"], line["step"]) for line in lines if "loss" in line)

    def outcome(self, exit_code: int) -> Outcome:
        """Read what the run left."""
        config = self._config()
        losses, evaluations = read_series(self.run_dir, config.num_drafters)
        drafters = [list(read_metrics(self.run_dir, actor_name("drafter", rank))) for rank in range(config.num_drafters)]
        targets = [line for index in range(config.num_targets) for line in read_metrics(self.run_dir, f"target-{index}")]
        steps = [[line["step"] for line in lines if "loss" in line] for lines in drafters]
        export = self.run_dir / "export" / "model.safetensors"
        times = [time_s for time_s, _ in self.steps()]
        return Outcome(
            exit_code=exit_code,
            losses=losses,
            acceptance={step: line["acceptance"] for step, line in evaluations.items()},
            weights=hashlib.sha256(export.read_bytes()).hexdigest() if export.exists() else "",
            num_steps_repeated=max(len(numbers) - len(set(numbers)) for numbers in steps),
            num_batches_again=len(targets) - len({line["batch"] for line in targets}),
            num_rejected=sum("rejected_batch" in line for lines in drafters for line in lines),
            longest_pause_s=max((after - before for before, after in itertools.pairwise(times)), default=0.0),
        )

    def inconsistent_steps(self) -> list[int]:
        """Steps of which two lines, of whatever rank or life, name different losses: there must be none."""
        seen: dict[int, set[str]] = {}
        for rank in range(self._config().num_drafters):
            for line in read_metrics(self.run_dir, actor_name("drafter", rank)):
                if "loss" in line:
                    seen.setdefault(line["step"], set()).add(json.dumps(line["loss"]))
        return sorted(step for step, losses in seen.items() if len(losses) > 1)

    def _config(self) -> Config:
        return read(self.run_dir)
