"""Whole runs whose target is split over several devices: the losses and the export of a target on one."""

import re
from contextlib import closing

import msgspec

from common.actor.faults import Fault
from common.metrics import read_metrics
from launch.control import Operator
from tests.builders.launched_runs import LaunchedRun

SPLIT = 'targets.devices=["cpu+cpu+cpu"]'


def check_equal(run: LaunchedRun, reference: LaunchedRun) -> None:
    assert run.end() == 0, run.log_tails()
    assert run.losses() == reference.losses()
    assert run.evaluations() == reference.evaluations()
    assert run.weights() == reference.weights()
    assert run.pids() == []


def test_a_split_target_trains_the_same_drafter(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start(SPLIT)
    run.wait_for_step(4)
    with closing(Operator(run.directory)) as operator:
        target = next(actor for actor in operator.status().actors if actor.name == "target-0")
    assert [device.name for device in target.devices] == ["cpu"] * 3
    assert all(device.busy is not None and 0 < device.busy <= 1 for device in target.devices)
    check_equal(run, small_reference)
    assert re.search(r"weights made in .* on cpu\+cpu\+cpu", run.log("target-0"))
    for line in read_metrics(run.directory, "target-0"):
        assert len(line["devices"]) == 3
        assert abs(sum(device["forward_s"] for device in line["devices"]) / 3 - line["forward_s"]) < 1e-6


def test_a_split_target_that_dies_in_its_forward_and_in_its_copy_changes_nothing(
    small_reference: LaunchedRun, run: LaunchedRun
) -> None:
    """The second tap of a batch is of another stage than the first."""
    points = [("target.mid_forward", 12), ("target.mid_forward", 7), ("target.mid_copy", 6), ("target.before_slot_ready", 6)]
    faults = {"target-0": [Fault(point, visit) for point, visit in points]}
    run.directory.mkdir(mode=0o700)
    (run.directory / "faults.json").write_bytes(msgspec.json.encode(faults))
    run.start(SPLIT)
    check_equal(run, small_reference)
    assert run.num_incarnations("target-0") == 5
    assert run.stderr.count("target-0 ended with signal SIGKILL") == 4
