"""Run the whole pipeline on a real small model, on CPU: `python3 -m launch.demo`.

Every stage is a command that a person could type; it is printed before it runs.
The model, the conversations and the prepared data are kept in `~/.cache/headrace` and made once.
Exit codes: 0 done, else that of the first stage that failed.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

from launch import bootstrap

PROMPTS = "launch/configs/demo_prompts.jsonl"
CACHE = Path("~/.cache/headrace").expanduser()
PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stage(NamedTuple):
    """A command to run. One with results is skipped while they exist and the same command made them."""

    module: str
    arguments: list[str]
    results: tuple[Path, ...] = ()

    @property
    def command(self) -> list[str]:
        """Words that a person would type after `python`."""
        return ["-m", self.module, *self.arguments]


def plan(cache: Path, run_dir: Path) -> list[Stage]:
    """List the stages in order; the last two make a run and show a sample of it."""
    model, data = cache / "smollm2-135m-instruct", cache / "demo"
    answers, train, held_out = data / "conversations.jsonl", data / "train", data / "eval"
    regenerate = ["--model", model, "--prompts", PROMPTS, "--out", answers, "--max-new-tokens", 48, "--batch-size", 32]
    prepare = ["--model", model, "--input", answers, "--out", train]
    prepare += ["--eval-out", held_out, "--eval-samples", 24, "--max-length", 512]
    return [
        Stage("launch.smollm2", ["--out", str(model)], (model,)),
        Stage("launch.regenerate", [str(word) for word in regenerate], (answers,)),
        Stage("launch.prepare", [str(word) for word in prepare], (train, held_out)),
        Stage("launch.start_all", ["launch/configs/demo.toml", "--run-dir", str(run_dir)]),
        Stage("launch.evaluate", [str(run_dir), "--num-prompts", "3"]),
    ]


def run(stages: list[Stage], python: Path, marks: Path) -> int:
    """Run the stages that have to run; return the exit code of the first that failed, or 0.

    Args:
        marks: a folder with a file per finished stage, holding its command; written after the results.
    """
    remake = False  # the stages after one that ran again run again too
    for stage in stages:
        mark = marks / f"{stage.module}.done"
        remake = remake or not _is_done(stage, mark)
        if not remake:
            print(f"kept: {', '.join(map(str, stage.results))}", flush=True)
            continue
        for result in stage.results:
            _remove(result)
        code = _run_shown([str(python), *stage.command])
        if code != 0:
            return code
        if stage.results:
            marks.mkdir(parents=True, exist_ok=True)
            mark.write_text(shlex.join(stage.command))
    return 0


def _is_done(stage: Stage, mark: Path) -> bool:
    made = bool(stage.results) and all(result.exists() for result in stage.results)
    return made and mark.exists() and mark.read_text() == shlex.join(stage.command)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run_shown(command: list[str]) -> int:
    """Run one command in a process group of its own, so that a Ctrl-C reaches it once: through this process."""
    signals: SimpleQueue[int] = SimpleQueue()
    heeded = [signum for signum in PASSED_ON if signal.getsignal(signum) != signal.SIG_IGN]  # nohup ignores one
    before = {signum: signal.signal(signum, lambda signum, _frame: signals.put(signum)) for signum in heeded}
    print(f"\n$ {shlex.join(command)}", flush=True)
    started_s = time.monotonic()
    child = subprocess.Popen(command, cwd=bootstrap.ROOT, stdin=subprocess.DEVNULL, process_group=0)
    while child.poll() is None:
        try:
            child.send_signal(signals.get(timeout=0.1))
        except Empty:
            continue
    for signum, handler in before.items():
        signal.signal(signum, handler)
    print(f"[{time.monotonic() - started_s:.0f} s, exit code {child.returncode}]", flush=True)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def main() -> int:
    """Bootstrap the environment, run every stage, return the exit code."""
    parser = argparse.ArgumentParser(prog="python3 -m launch.demo", description="Trains and shows a drafter for SmolLM2-135M.")
    parser.add_argument("--fresh", action="store_true", help="make the model, the conversations and the data again")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    folder = bootstrap.ROOT / "docker"
    python = bootstrap.ensure(bootstrap.ROOT, [folder / "requirements-cpu.txt"], [folder / "requirements-demo.txt"])
    if arguments.fresh:
        _remove(CACHE / "marks")
    run_dir = Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")
    code = run(plan(CACHE, run_dir), python, CACHE / "marks")
    print(f"\ndemo: exit code {code} after {time.monotonic() - started_s:.0f} s; run directory: {run_dir}", flush=True)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
