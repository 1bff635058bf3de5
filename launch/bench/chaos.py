"""`python -m launch.bench chaos --minutes N`: random kills and stops of any actor; the training must not notice.

One undisturbed run and one disturbed run of the same configuration. Exit code 1 if the disturbed
one lost, repeated or corrupted anything, or stood still for longer than its limit.
"""

import argparse
import os
import random
import signal
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from launch.bench.harness.trial import STALL_TIMEOUT_S, Outcome, Trial

ACTORS = ["exchange", "target-0", "target-1", "drafter-0", "drafter-1"]
EPOCHS_PER_MINUTE = 60


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.bench chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0, help="about how long both runs take together")
    parser.add_argument("--seed", type=int, default=0, help="of the kills")
    parser.add_argument("--max-pause-s", type=float, default=20 * STALL_TIMEOUT_S, help="between two steps")
    args = parser.parse_args(arguments)
    overrides = [f"plan.epochs={max(4, round(EPOCHS_PER_MINUTE * args.minutes))}"]
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as folder:
        undisturbed = Trial(Path(folder) / "undisturbed", overrides)
        reference = undisturbed.outcome(undisturbed.start().wait())
        disturbed = Trial(Path(folder) / "chaos", overrides)
        exit_code, counts = disturb(disturbed, random.Random(args.seed))
        outcome = disturbed.outcome(exit_code)
        wrong = find_wrong(reference, outcome, disturbed.inconsistent_steps(), args.max_pause_s)
        print_table(outcome, counts, wrong)
        if wrong:
            print(disturbed.output())
    return 1 if wrong else 0


def disturb(trial: Trial, randomness: random.Random) -> tuple[int, Counter[str]]:
    """Kill and stop actors at random until the run ends; return its exit code and the disturbances by kind."""
    counts: Counter[str] = Counter()
    process = trial.start()
    while process.poll() is None:
        try:
            process.wait(randomness.uniform(0.3, 4.0))
        except subprocess.TimeoutExpired:
            counts[disturb_once(trial, randomness)] += 1
    return process.returncode, counts


def disturb_once(trial: Trial, randomness: random.Random) -> str:
    """Disturb one actor and return the kind; a stop is short, or lasts until the supervisor kills the hung actor."""
    pid = trial.pid(randomness.choice(ACTORS))
    kind = randomness.choices(["kill", "short stop", "hang"], [6, 2, 1])[0]
    try:
        if pid is None:
            return "nobody there"
        os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        if kind == "short stop":
            time.sleep(randomness.uniform(0.05, 1.0))
            os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return "nobody there"
    return kind


def find_wrong(reference: Outcome, outcome: Outcome, inconsistent: list[int], max_pause_s: float) -> list[str]:
    """Return the promises that the disturbed run did not keep."""
    checks = {
        f"exit codes {reference.exit_code} and {outcome.exit_code}": reference.exit_code == outcome.exit_code == 0,
        f"steps with two different losses: {inconsistent[:5]}": not inconsistent,
        "steps missing or added": outcome.losses.keys() == reference.losses.keys(),
        "losses differ from the undisturbed run": outcome.losses == reference.losses,
        "acceptance differs from the undisturbed run": outcome.acceptance == reference.acceptance,
        "final weights differ from the undisturbed run": outcome.weights == reference.weights != "",
        f"{outcome.num_rejected} slots arrived damaged": outcome.num_rejected == 0,
        f"{outcome.longest_pause_s:.1f} s without a step, more than {max_pause_s:g} s": outcome.longest_pause_s <= max_pause_s,
    }
    return [promise for promise, holds in checks.items() if not holds]


def print_table(outcome: Outcome, counts: Counter[str], wrong: list[str]) -> None:
    rows = {
        "steps": len(outcome.losses),
        **counts,
        "steps repeated by a rank": outcome.num_steps_repeated,
        "batches computed again": outcome.num_batches_again,
        "slots that arrived damaged": outcome.num_rejected,
        "longest pause between steps, s": f"{outcome.longest_pause_s:.1f}",
        "verdict": "; ".join(wrong) or "losses, acceptance and weights bit for bit as undisturbed",
    }
    for name, value in rows.items():
        print(f"{name:<32} {value}")
