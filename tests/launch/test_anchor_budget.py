"""Runs that choose their anchor budget: once, whoever dies, and for every later start."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from common.actor.faults import Fault
from tests.builders.launched_runs import TWO_BY_TWO, LaunchedRun

AUTO = ("train.anchors_per_batch=auto", "plan.epochs=4", *TWO_BY_TWO)


@pytest.fixture
def other_run(tmp_path: Path) -> Iterator[LaunchedRun]:
    run = LaunchedRun(tmp_path / "other")
    yield run
    run.kill_what_is_left()


def chosen(run: LaunchedRun) -> int:
    return int(json.loads((run.directory / "anchors.json").read_text())["anchors_per_batch"])


def plan_faults(run: LaunchedRun, faults: dict[str, list[Fault]]) -> None:
    run.directory.mkdir(mode=0o700, exist_ok=True)
    (run.directory / "faults.json").write_bytes(msgspec.json.encode(faults))


def num_measured(run: LaunchedRun) -> int:
    """Of all lives of all actors."""
    return sum(run.log(f"drafter-{index}").count("a batch takes") for index in (0, 1)) + sum(
        run.log(f"target-{index}").count("tokens/s") for index in (0, 1)
    )


def test_a_run_chooses_once_and_goes_on_with_its_choice(run: LaunchedRun) -> None:
    slow = {"drafter-0": [Fault("drafter.before_step", action="sleep", sleep_s=0.2)]}  # so that it is told before it is done
    plan_faults(run, slow)
    run.start(*AUTO)
    run.wait_for_step(4)
    run.signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM, run.log_tails()
    budget = json.loads((run.directory / "anchors.json").read_text())
    assert budget["anchors_per_batch"] % 32 == 0
    assert 32 <= budget["anchors_per_batch"] <= 256
    assert len(budget["target_tokens_per_s"]) == len(budget["drafter_costs"]) == 2
    assert all(speed > 0 for speed in budget["target_tokens_per_s"])
    assert "on average: the targets make" in run.log("drafter-0")
    assert num_measured(run) == 4

    plan_faults(run, {})
    run.start(*AUTO)
    assert run.end() == 0, run.log_tails()
    assert num_measured(run) == 4
    assert chosen(run) == budget["anchors_per_batch"]
    assert json.loads((run.directory / "report.json").read_text())["anchors_per_batch"] == chosen(run)


def test_a_chosen_number_trains_as_the_same_number_given(run: LaunchedRun, other_run: LaunchedRun) -> None:
    """Also where a target dies before anybody measured, and drafter 0 after the choice."""
    faults = {"target-0": [Fault("target.mid_forward", 1)], "drafter-0": [Fault("drafter.before_step", 3)]}
    plan_faults(run, faults)
    run.start(*AUTO)
    assert run.end() == 0, run.log_tails()
    assert run.num_lives("target-0") == run.num_lives("drafter-0") == 2
    other_run.start(*AUTO, f"train.anchors_per_batch={chosen(run)}")
    assert other_run.end() == 0, other_run.log_tails()
    assert not (other_run.directory / "anchors.json").exists()
    assert run.weights() == other_run.weights()
    assert run.losses(1) == other_run.losses(1)


def test_a_damaged_choice_is_an_error(run: LaunchedRun) -> None:
    run.directory.mkdir(mode=0o700)
    (run.directory / "anchors.json").write_text("{")
    run.start(*AUTO)
    assert run.end() == 2, run.log_tails()
    assert "anchors.json: needed the anchor budget of a run" in run.stderr
    assert json.loads((run.directory / "report.json").read_text())["anchors_per_batch"] is None
