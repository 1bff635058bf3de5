"""Deaths of any actor at any instant: the same losses, the same weights. And the check can fail."""

import os
import signal
import time
from pathlib import Path
from subprocess import Popen

import msgspec
import pytest

from common.actor.faults import Fault
from common.config import read
from common.ring.layout import SlotLayout
from common.ring.ring import RingReader
from common.ring.slot_table import SlotState, SlotTable
from launch.bench import chaos
from launch.bench.faults import OVERRIDES, SCENARIOS, THREE_DRAFTERS
from launch.bench.harness.trial import Outcome, Trial
from tests.builders.launched_runs import CONFIG, ROOT
from tests.builders.tampering import is_stopped, open_memory_of
from tests.builders.warm_start import WarmProcess

pytestmark = pytest.mark.usefixtures("warm_trials")
AT_ONCE = "supervision.backoff_s=0"  # the pause before a restart doubles with each, and these actors die up to nine times
ONE_TARGET = ["plan.epochs=8", 'targets.devices=["cpu"]', AT_ONCE]  # nobody else does its work while it is dead


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    trial = Trial(tmp_path_factory.mktemp("trials") / "undisturbed", ONE_TARGET)
    outcome = trial.outcome(trial.start().wait())
    assert outcome.exit_code == 0
    assert outcome.num_steps_repeated == outcome.num_rejected == 0  # batches may be computed again: see Router._room_in
    return outcome


def all_faults_of(*roles: str) -> dict[str, list[Fault]]:
    """Return the faults of all scenarios of these roles only, one after the other in one run."""
    merged: dict[str, list[Fault]] = {}
    for scenario in SCENARIOS:
        if (
            scenario.faults
            and scenario.overrides == OVERRIDES
            and all(name.partition("-")[0] in roles for name in scenario.faults)
        ):
            for name, faults in scenario.faults.items():
                early = [msgspec.structs.replace(fault, visit=min(fault.visit, 5)) for fault in faults]
                merged.setdefault(name, []).extend(early)
    return merged


@pytest.mark.parametrize("role", ["target", "drafter", "exchange"])
def test_every_instant_of_death_changes_nothing(role: str, undisturbed: Outcome, tmp_path: Path) -> None:
    faults = all_faults_of(role)
    if role == "exchange":
        faults["exchange"] = [Fault("exchange.after_store", visit) for visit in (13, 24, 35, 46)]
    trial = Trial(tmp_path / "run", ONE_TARGET, faults)
    outcome = trial.outcome(trial.start().wait())
    assert len(list(trial.run_dir.glob("fault-*.happened"))) == sum(map(len, faults.values()))
    assert outcome.exit_code == 0, (trial.run_dir / "output").read_text()
    assert outcome.equals(undisturbed)
    assert trial.inconsistent_steps() == []
    assert outcome.num_rejected == 0


DFLASH2 = [*ONE_TARGET, "draft.kind=dflash2", "draft.conv_group_size=8", "draft.selector_rank=8", "draft.selector_top_k=4"]


def test_deaths_of_every_actor_change_nothing_of_a_dflash2(tmp_path: Path) -> None:
    faults = {
        "target-0": [Fault("target.mid_copy", 5)],
        "drafter-0": [Fault("drafter.mid_collective", 5)],
        "drafter-1": [Fault("drafter.before_step", 12)],
        "exchange": [Fault("exchange.after_store", 24)],
    }
    outcomes = []
    for name, disturbance in (("undisturbed", dict[str, list[Fault]]()), ("disturbed", faults)):
        trial = Trial(tmp_path / name, DFLASH2, disturbance)
        outcomes.append(trial.outcome(trial.start().wait()))
        assert len(list(trial.run_dir.glob("fault-*.happened"))) == sum(map(len, disturbance.values()))
        assert outcomes[-1].exit_code == 0, trial.output()
        assert trial.inconsistent_steps() == []
    assert outcomes[0].equals(outcomes[1])
    assert outcomes[0].acceptance[0] < max(outcomes[0].acceptance.values())


# One death after the other in one run, with steps between the pairs. A newcomer takes over six tensors. Two deaths that fall
# together form one group instead of two, so the last deaths of drafter-1 only form enough groups for the others' visits.
CONNECTING = {  # the newcomer, then a bystander, then the giver
    "drafter-1": [Fault("drafter.before_step", 5), Fault("drafter.before_connecting"), *[Fault("drafter.before_step", 5)] * 4],
    "drafter-2": [Fault("drafter.before_connecting", 4)],
    "drafter-0": [Fault("drafter.before_connecting", 6)],
}
HANDING_OVER = {  # a bystander, then the giver (who was a newcomer before), then the newcomer
    "drafter-1": [
        *(Fault("drafter.before_step", visit) for visit in (3, 8, 3)),
        Fault("drafter.mid_hand_over", 3),
        *[Fault("drafter.before_step", 3)] * 2,
    ],
    "drafter-2": [Fault("drafter.mid_hand_over", 3)],
    "drafter-0": [Fault("drafter.before_step", 8), Fault("drafter.mid_hand_over", 9)],
}


@pytest.fixture(scope="module")
def undisturbed_three(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    trial = Trial(tmp_path_factory.mktemp("trials") / "three", THREE_DRAFTERS)
    return trial.outcome(trial.start().wait())


@pytest.mark.parametrize("faults", [CONNECTING, HANDING_OVER], ids=["connecting", "handing over"])
def test_a_death_while_the_group_forms_anew_holds_nobody(
    faults: dict[str, list[Fault]], undisturbed_three: Outcome, tmp_path: Path
) -> None:
    """Nobody is killed for being silent, so a survivor that a dead peer holds would hold the run for ever."""
    trial = Trial(tmp_path / "run", [*THREE_DRAFTERS, "supervision.stall_timeout_s=1000"], faults)
    process = trial.start()
    try:
        outcome = trial.outcome(process.wait(timeout=120))
    finally:
        process.kill()
    assert len(list(trial.run_dir.glob("fault-*.happened"))) == sum(map(len, faults.values()))
    assert undisturbed_three.exit_code == outcome.exit_code == 0, (trial.run_dir / "output").read_text()
    assert outcome.equals(undisturbed_three)
    assert trial.inconsistent_steps() == []


def test_random_kills_and_stops_change_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert chaos.main(["--minutes", "0.3", "--seed", "1", "--max-pause-s", "600"]) == 0, capfd.readouterr().out
    assert "bit for bit as undisturbed" in capfd.readouterr().out


def let_write_on(stopped: int, trial: Trial) -> None:
    """Wake a target that was taken for dead; return when it has written on into a filled slot that was not read meanwhile."""
    drafter, exchange = trial.pid("drafter-0"), trial.pid("exchange")
    assert drafter is not None and exchange is not None
    table = SlotTable(open_memory_of(exchange, "headrace-control"), 1)
    ring = RingReader(open_memory_of(drafter, "headrace-ring-0"), SlotLayout.of(read(trial.run_dir)), 1)
    freeze_process(drafter)
    while table.read(0).state != SlotState.READY:
        os.kill(drafter, signal.SIGCONT)
        time.sleep(0.02)
        freeze_process(drafter)
    before = ring.open(0).header
    os.kill(stopped, signal.SIGCONT)
    while ring.open(0).header == before:  # the header comes last
        time.sleep(0.001)
    os.kill(drafter, signal.SIGCONT)


def freeze_process(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):
        time.sleep(0.001)


def start_unfenced(trial: Trial) -> WarmProcess:
    """Start a trial under tests/builders/unfenced_start.py."""
    arguments = [str(CONFIG), "--run-dir", str(trial.run_dir), "--set", *trial._overrides]
    output = trial.run_dir / "output"
    return WarmProcess(arguments, ROOT, output, output, module="tests.builders.unfenced_start")


@pytest.mark.parametrize("fencing", [True, False])
def test_only_fencing_keeps_a_hung_target_from_damaging_slots(fencing: bool, undisturbed: Outcome, tmp_path: Path) -> None:
    """A target stops in mid-copy and is taken for dead; without the kill that should follow, it wakes up and writes on
    into a slot that its successor has filled. This is the negative control of every check for damage."""
    faults = {
        "target-0": [Fault("target.mid_copy", 3, "stop")],
        "drafter-0": [Fault("drafter.before_step", 1, "sleep", sleep_s=0.1)],  # so that filled slots wait
    }
    trial = Trial(tmp_path / "run", [*ONE_TARGET, "ring.num_slots=1"], faults)
    process: Popen[bytes] | WarmProcess = trial.start() if fencing else start_unfenced(trial)
    while not list(trial.run_dir.glob("fault-target-0-*.happened")):
        time.sleep(0.05)
    stopped = trial.pid("target-0")
    assert stopped is not None
    while trial.pid("target-0") == stopped:  # until it has a successor
        time.sleep(0.05)
    if fencing:
        with pytest.raises(ProcessLookupError):
            os.kill(stopped, signal.SIGCONT)
    else:
        let_write_on(stopped, trial)
    outcome = trial.outcome(process.wait())
    assert (outcome.num_rejected > 0) is not fencing
    assert outcome.exit_code == 0
    assert outcome.equals(undisturbed)  # damage is found by its checksum, and the batch produced again
