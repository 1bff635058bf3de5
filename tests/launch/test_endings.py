"""The ends of a run, by real signals and real failures, and what its report says of it."""

import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from typing import Any

import msgspec
import pytest

from common.actor.faults import Fault
from launch.control import Operator
from tests.builders.launched_runs import CONFIG, ROOT, SHORT, LaunchedRun
from tests.builders.tampering import freeze


def read_report(run: LaunchedRun) -> dict[str, Any]:
    """The report, which is strict JSON and printed where it lies."""
    path = run.directory / "report.json"
    assert f"report: {path}\n" in run.stdout
    report: dict[str, Any] = json.loads(path.read_text(), parse_constant=pytest.fail)
    return report


def test_report_of_a_run_that_came_to_its_end(small_reference: LaunchedRun) -> None:
    report = read_report(small_reference)
    assert (report["cause"], report["exit_code"], report["actor"], report["resume"]) == ("done", 0, None, None)
    losses, evaluations = small_reference.losses(), small_reference.evaluations()
    assert report["step"] == report["num_steps"] == len(losses)
    assert (report["loss_first"], report["loss_last"]) == (losses[1], losses[len(losses)])
    assert (report["acceptance_first"], report["acceptance_last"]) == (evaluations[0], evaluations[len(losses)])
    assert report["num_samples"] == 16 * 32  # epochs of the data set
    assert [actor["restarts"] for actor in report["actors"]] == [0, 0, 0]
    assert [actor["lost_s"] for actor in report["actors"]] == [0, 0, 0]


def test_the_first_ctrl_c_saves_and_the_second_ends_the_run_at_once(run: LaunchedRun) -> None:
    run.start("supervision.stop_timeout_s=1000")
    run.wait_for_step(2)
    run.signal(signal.SIGINT)
    assert run.end() == 130, run.log_tails()
    last = run.steps()[-1]
    assert (run.directory / "checkpoints" / f"step-{last:08}").is_dir()
    assert read_report(run)["reason"] == "signal SIGINT"

    run.start("supervision.stop_timeout_s=1000")
    run.wait_for_step(last + 1)
    assert not (run.directory / "report.json").exists()
    freeze(run, "drafter-0")
    run.signal(signal.SIGINT)
    operator = Operator(run.directory)
    run.wait_until(lambda: operator.status().state == "stopping")  # and waits for the drafter that hangs
    operator.close()
    run.signal(signal.SIGINT)
    assert run.end() == 130
    assert run.pids() == []
    report = read_report(run)
    assert (report["cause"], report["step"]) == ("stopped", max(run.steps()))


def test_a_crash_loop_names_the_culprit_and_its_last_lines(run: LaunchedRun) -> None:
    run.start("supervision.max_restarts=1")
    run.wait_until((run.directory / "logs" / "target-0.log").exists)
    for incarnation in (1, 2):
        run.wait_until(lambda number=incarnation: run.log("target-0").count("model loaded") == number)  # type: ignore[misc]
        os.kill(run.pid("target-0"), signal.SIGKILL)
    assert run.end() == 1
    reason = "target-0 ended 2 times within 60 s, last with signal SIGKILL"
    assert f"error: {reason}\n" in run.stderr
    assert "model loaded in" in run.stderr
    assert f"(all of it: {run.directory / 'logs' / 'target-0.log'})" in run.stderr
    report = read_report(run)
    assert (report["cause"], report["exit_code"], report["actor"], report["reason"]) == ("gave up", 1, "target-0", reason)
    assert report["last_lines"] == run.log("target-0").splitlines()[-12:]
    assert report["resume"].startswith("python -m launch.start_all ")


def test_deaths_in_a_row_end_the_run_with_what_the_actor_said_last(run: LaunchedRun) -> None:
    """Deaths end the run however long each incarnation lasts; one that dies in its first forward leaves no output."""
    run.directory.mkdir()
    faults = {"target-0": [Fault("target.mid_forward")] * 3}
    (run.directory / "faults.json").write_bytes(msgspec.json.encode(faults))
    assert run.start("supervision.max_restarts=100", "supervision.stop_timeout_s=1000").end() == 1  # nobody waits for it
    reason = "target-0 ended 3 times without a new batch or step between, last with signal SIGKILL"
    assert f"error: {reason}\n" in run.stderr
    assert read_report(run)["reason"] == reason
    assert run.pids() == []


def test_a_terminal_that_is_closed_ends_the_run_in_good_order(run: LaunchedRun) -> None:
    """The line fits it while it is there; then every write to it fails, and SIGHUP is as SIGTERM."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    program = "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    program += "; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    line = [sys.executable, "-c", program, "-m", "launch.start_all", str(CONFIG), "--run-dir", str(run.directory)]
    started = subprocess.Popen(
        [*line, "--set", *SHORT, "plan.epochs=1000"], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    seen = b""
    while len(shown := re.findall(rb"\r(step [^\r\n]*)\x1b\[K", seen)) < 2 or b"acceptance 1" not in shown[-1]:
        seen += os.read(ours, 65536)
    os.close(ours)
    started.send_signal(signal.SIGHUP)  # a shell passes its own on
    assert started.wait(120) == 128 + signal.SIGHUP, run.log_tails()
    assert max(map(len, shown)) < 80
    last = run.steps()[-1]
    assert (run.directory / "checkpoints" / f"step-{last:08}").is_dir()
    report = json.loads((run.directory / "report.json").read_text())
    assert (report["cause"], report["exit_code"], report["reason"]) == ("stopped", 129, "signal SIGHUP")
    assert not (run.directory / "control.sock").exists()
    assert run.pids() == []


def test_a_run_under_nohup_hears_no_hangup(run: LaunchedRun) -> None:
    """And a stop before the second evaluation claims no acceptance after training."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as the child inherits it
    try:
        run.start("evaluation.every_steps=1000", "plan.epochs=1000")
    finally:
        signal.signal(signal.SIGHUP, before)
    run.wait_for_step(2)
    run.signal(signal.SIGHUP)
    run.wait_for_step(max(run.losses()) + 2)
    run.signal(signal.SIGTERM)
    assert run.end() == 128 + signal.SIGTERM
    before_training = run.evaluations()[0]
    assert f"held-out acceptance length             {before_training:.3f} before training\n" in run.stdout
    report = read_report(run)
    assert (report["acceptance_first"], report["acceptance_last"]) == (before_training, None)


def test_a_supervisor_that_fails_leaves_a_report_and_no_process(run: LaunchedRun) -> None:
    run.start("supervision.backoff_s=2")
    run.wait_for_step(1)
    os.kill(run.pid("target-0"), signal.SIGKILL)
    (run.directory / "logs").rename(run.directory / "elsewhere")
    (run.directory / "logs").write_text("in the way of the next incarnation")
    assert run.end() == 1
    report = read_report(run)
    assert (report["cause"], report["actor"]) == ("supervisor failed", None)
    assert report["reason"].startswith("FileExistsError: ")
    assert report["last_lines"][-1] == report["reason"]
    assert "Traceback" in run.stderr
    assert run.pids() == []
