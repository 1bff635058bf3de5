"""Deaths, stops, hangs and damage in real runs: the losses and the final weights are those of an undisturbed run."""

import json
import os
import re
import signal
from contextlib import closing

import pytest
import torch

from launch.control import Operator
from tests.builders.launched_runs import TWO_BY_TWO, LaunchedRun, identity, open_files, shared_memory
from tests.builders.tampering import freeze, ready_slots, thaw, write_header

HUGE_NOISE = ("train.noise=gaussian", "train.noise_scale=3e38")  # no product of it is finite


def test_a_killed_target_exchange_and_drafter_change_nothing(reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start(*TWO_BY_TWO)
    for step, name in ((4, "target-0"), (12, "exchange"), (20, "drafter-1")):
        run.wait_for_step(step)
        killed = run.pid(name)
        os.kill(killed, signal.SIGKILL)
        run.wait_until(lambda name=name, killed=killed: run.pids(name) not in ([], [killed]))  # type: ignore[misc]
    assert run.end() == 0, run.log_tails()
    assert [run.num_incarnations(name) for name in ("exchange", "drafter-0", "drafter-1", "target-1")] == [2, 1, 2, 1]
    assert run.steps(rank=0) == reference.steps(rank=0)  # the survivor rolled nothing back: every step once
    assert "rank 0 sent its state" in run.log("drafter-1")
    apart, together = run.logged_s("drafter-0", "waiting for 2 ranks")[1], run.logged_s("drafter-0", "sent its state")[0]
    assert not [
        time_s for time_s in run.reported_s() if apart + 0.01 < time_s < together
    ]  # a step that is done is told at once
    assert run.losses() == reference.losses()
    assert run.evaluations() == reference.evaluations()
    assert run.weights() == reference.weights()
    assert run.pids() == []


def test_a_stopped_and_a_killed_run_go_on_where_they_were(reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start(*TWO_BY_TWO)
    run.wait_for_step(9)
    memory = {identity(path) for path in shared_memory(run.pid("drafter-0")).values()}
    assert len(memory & open_files()) == 3  # the board and two rings
    run.signal(signal.SIGTERM)
    assert run.end() == 143, run.log_tails()
    assert run.pids() == []
    assert not memory & open_files()
    assert f"--run-dir {run.directory}" in run.stdout
    last = run.steps()[-1]
    assert last < len(reference.steps())
    record = json.loads((run.directory / "checkpoints" / f"step-{last:08}" / "checkpoint.json").read_text())
    assert record["step"] == last

    run.start(*TWO_BY_TWO)
    run.wait_for_step(last + 2)
    assert run.steps()[: last + 1] == list(range(1, last + 2))  # no step was lost, none was done again
    memory = {identity(path) for path in shared_memory(run.pid("drafter-0")).values()}
    run.signal(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    run.wait_until_gone(memory)

    run.start()  # with one target and one drafter: the same batches in the same steps
    assert run.end() == 0, run.log_tails()
    assert run.losses() == reference.losses()
    assert run.evaluations() == reference.evaluations()
    assert run.weights() == reference.weights()


def test_a_stop_does_not_wait_for_drafters_that_wait_for_each_other(run: LaunchedRun) -> None:
    run.start('drafters.devices=["cpu", "cpu"]', "supervision.stop_timeout_s=1000")
    freeze(run, "drafter-1")
    run.wait_until(lambda: "waiting for 2 ranks" in run.log("drafter-0"))
    run.signal(signal.SIGTERM)
    assert run.end() == 143
    assert run.pids() == []


@pytest.mark.parametrize("drafters", ['["cpu"]', '["cpu", "cpu"]'])
def test_drafters_that_wait_for_a_dead_target_save_and_leave_at_once(
    small_reference: LaunchedRun, run: LaunchedRun, drafters: str
) -> None:
    settings = (f"drafters.devices={drafters}", "checkpoint.every_steps=1000")
    run.start(*settings, "supervision.stop_timeout_s=1000", "supervision.backoff_s=1000")
    run.wait_for_step(2)
    for incarnation in (1, 2):  # after the second it stays down for long
        run.wait_until(lambda incarnation=incarnation: run.num_incarnations("target-0") == incarnation)  # type: ignore[misc]
        os.kill(run.pid("target-0"), signal.SIGKILL)
    with closing(Operator(run.directory)) as operator:
        run.wait_until(lambda: [actor.state for actor in operator.status().actors if actor.name == "target-0"] == ["down"])
    run.signal(signal.SIGTERM)
    assert run.end() == 143, run.log_tails()
    last = max(run.losses())
    assert (run.directory / "checkpoints" / f"step-{last:08}").is_dir()
    assert run.start(*settings).end() == 0, run.log_tails()
    assert run.steps() == small_reference.steps()  # no step was lost or made again
    assert run.losses() == small_reference.losses()
    assert run.weights() == small_reference.weights()


def test_a_hung_actor_is_killed_and_started_again(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start("supervision.stall_timeout_s=4")
    run.wait_for_step(4)
    os.kill(run.pid("drafter-0"), signal.SIGUSR1)
    run.wait_until(lambda: "most recent call first" in run.log("drafter-0"))  # the stacks that a hung actor dumps
    freeze(run, "target-0")
    assert run.end() == 0, run.log_tails()
    assert "target-0 made no progress for 4 s: its stacks go to its log, then it is killed" in run.stderr
    assert "target-0 ended with signal SIGKILL" in run.stderr
    assert run.losses() == small_reference.losses()
    assert run.weights() == small_reference.weights()


def test_a_damaged_slot_is_detected_and_produced_again(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start()
    run.wait_for_step(4)
    frozen = freeze(run, "drafter-0")
    (_, first), (_, second), (third, slot) = ready_slots(run, at_least=3)
    first.hidden_states.view(torch.int16)[-1, -1, -1] ^= 1
    second.rows.input_ids[0] ^= 1
    write_header(run, third, slot.header._replace(plan_hash=bytes(16)))
    thaw(frozen)
    assert run.end() == 0, run.log_tails()
    found = re.findall(r"slot \d, batch \d+: (.*): needed .*; it is produced again", run.log("drafter-0"))
    assert found == ["hidden states checksum", "rows checksum", "plan hash"]
    assert run.losses() == small_reference.losses()
    assert run.weights() == small_reference.weights()


def test_too_many_steps_that_are_not_finite_end_the_run(run: LaunchedRun) -> None:
    run.start('drafters.devices=["cpu", "cpu"]', *HUGE_NOISE, "train.max_nonfinite_steps=2")
    assert run.end() == 1
    assert "step 3: 3 steps in a row had a loss or gradient that is not finite (train.max_nonfinite_steps = 2)" in run.stderr
    assert run.skipped_steps() == [1, 2, 3]
    assert run.pids() == []
