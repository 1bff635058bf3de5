"""`python -m launch.bench faults`: every way to die, at its exact instant, and the cost of it.

Each row is a whole run of launch/configs/tiny.toml in which the named processes kill or stop
themselves at the named instant. Lost and repeated batches are judged by the result: losses, acceptance
and final weights must equal those of an undisturbed run bit for bit.
"""

import argparse
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from common.actor.faults import Fault
from launch.bench.harness.trial import Outcome, Trial, longest_pause_s

OVERRIDES = ["plan.epochs=4"]
THREE_DRAFTERS = ['drafters.devices=["cpu", "cpu", "cpu"]', "plan.batches_per_step=3", "plan.epochs=8"]


class Scenario(NamedTuple):
    """Faults and the run that they happen in."""

    name: str
    faults: dict[str, list[Fault]]
    supervisor_dies: bool = False
    overrides: list[str] = OVERRIDES


def _while_regrouping(when: str, point: str, visit: int) -> list[Scenario]:
    """Let rank 1 of three die, then one more while the group forms anew; `visit` is that of a survivor."""
    first = Fault("drafter.before_step", 9)
    second = {
        "newcomer": {"drafter-1": [first, Fault(point, 1)]},
        "giver": {"drafter-1": [first], "drafter-0": [Fault(point, visit)]},
        "bystander": {"drafter-1": [first], "drafter-2": [Fault(point, visit)]},
    }
    return [Scenario(f"{name} dies {when}", faults, overrides=THREE_DRAFTERS) for name, faults in second.items()]


SCENARIOS = [
    Scenario("target dies in its forward", {"target-0": [Fault("target.mid_forward", 12)]}),
    Scenario("target dies in its copy", {"target-0": [Fault("target.mid_copy", 6)]}),
    Scenario("target dies before SlotReady", {"target-0": [Fault("target.before_slot_ready", 6)]}),
    Scenario("target dies after SlotReady", {"target-0": [Fault("target.after_slot_ready", 6)]}),
    Scenario("target hangs in its copy", {"target-0": [Fault("target.mid_copy", 6, "stop")]}),
    Scenario("drafter dies in its fetch", {"drafter-1": [Fault("drafter.mid_fetch", 10)]}),
    Scenario("drafter dies before Release", {"drafter-1": [Fault("drafter.before_release", 10)]}),
    Scenario("drafter dies after Release, before the step", {"drafter-1": [Fault("drafter.after_release", 10)]}),
    Scenario("drafter dies in a collective", {"drafter-1": [Fault("drafter.mid_collective", 12)]}),
    Scenario("drafter dies between the sum and the step", {"drafter-1": [Fault("drafter.before_step", 9)]}),
    Scenario("drafter hangs before its step", {"drafter-1": [Fault("drafter.before_step", 9, "stop")]}),
    Scenario(
        "newcomer dies while it takes over the state",
        {"drafter-1": [Fault("drafter.mid_collective", 5), Fault("drafter.mid_collective", 5)]},
    ),
    *_while_regrouping("when all have come, before they connect", "drafter.before_connecting", 2),
    *_while_regrouping("in the hand-over of the state", "drafter.mid_hand_over", 3),
    Scenario("rank 0 dies while it writes a checkpoint", {"drafter-0": [Fault("drafter.mid_save", 1)]}),
    Scenario(
        "all drafters die",
        {"drafter-0": [Fault("drafter.before_step", 14)], "drafter-1": [Fault("drafter.before_step", 14)]},
    ),
    Scenario("exchange dies between two slot states", {"exchange": [Fault("exchange.after_store", 40)]}),
    Scenario(
        "exchange, target and drafter die at once",
        {
            "exchange": [Fault("exchange.after_store", 40)],
            "target-1": [Fault("target.mid_copy", 6)],
            "drafter-0": [Fault("drafter.before_step", 9)],
        },
    ),
    Scenario("supervisor dies, and all with it; started again", {}, supervisor_dies=True),
]


def main(arguments: list[str]) -> int:
    """Run them all and print a table in Markdown; return 1 if a result differs."""
    parser = argparse.ArgumentParser(prog="python -m launch.bench faults", description=__doc__)
    parser.add_argument("--only", default="", help="rows whose name contains this")
    args = parser.parse_args(arguments)
    num_wrong = 0
    with tempfile.TemporaryDirectory(prefix="headrace-faults-") as folder:
        references = {}
        print("| fault | same weights | steps repeated | batches computed again | damaged slots | longest pause after it, s |")
        print("|---|---|---|---|---|---|")
        for number, scenario in enumerate(SCENARIOS):
            if args.only in scenario.name:
                settings = tuple(scenario.overrides)
                if settings not in references:
                    undisturbed = Trial(Path(folder) / f"undisturbed-{number}", scenario.overrides)
                    references[settings] = undisturbed.outcome(undisturbed.start().wait())
                outcome, pause_s = run(scenario, Path(folder) / str(number))
                same = outcome.exit_code == 0 and outcome.equals(references[settings])
                num_wrong += not same
                print(_row(scenario, outcome, same, pause_s), flush=True)
    return 1 if num_wrong else 0


def run(scenario: Scenario, run_dir: Path) -> tuple[Outcome, float]:
    """Run once with the faults; return the result and the longest time without a step from the first fault on."""
    trial = Trial(run_dir, scenario.overrides, scenario.faults)
    process = trial.start()
    if scenario.supervisor_dies:
        while not any(line.step >= 14 for line in trial.steps()):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        (run_dir / "fault-supervisor-0.happened").touch()
        process.wait()
        process = trial.start()
    outcome = trial.outcome(process.wait())
    happened_s = min(mark.stat().st_mtime for mark in run_dir.glob("fault-*.happened"))
    return outcome, longest_pause_s([happened_s, *(line.time_s for line in trial.steps() if line.time_s > happened_s)])


def _row(scenario: Scenario, outcome: Outcome, same: bool, pause_s: float) -> str:
    figures = [outcome.num_steps_repeated, outcome.num_batches_again, outcome.num_rejected]
    return f"| {scenario.name} | {'yes' if same else 'NO'} | {' | '.join(map(str, figures))} | {pause_s:.1f} |"
