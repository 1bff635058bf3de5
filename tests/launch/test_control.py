"""The views and commands of an operator, through the real command, on one real run."""

import io
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import zmq

from common import wire
from common.run_dir import control_path
from launch import control
from launch.operate import control_messages
from launch.operate.control_messages import Refused
from tests.builders.huge_frames import BOUND_BYTES, peak_bytes, send_huge_frames
from tests.builders.launched_runs import ROOT, TWO_BY_TWO, LaunchedRun
from tests.builders.tampering import freeze, thaw

LONG = (*TWO_BY_TWO, "plan.epochs=1000", "supervision.max_restarts=0", "evaluation.every_steps=0")


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LaunchedRun]:
    """A run that is at work and does not end by itself; the first crash would end it."""
    run = LaunchedRun(tmp_path_factory.mktemp("control") / "run").start(*LONG)
    run.wait_for_step(3)
    run.wait_until(lambda: is_all_ready(run))
    yield run
    run.kill_what_is_left()


class Said(NamedTuple):
    """The result of a command."""

    code: int
    out: str
    err: str


def command(run: LaunchedRun, *words: str) -> Said:
    """In this process: a new one takes a second before it says anything."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        code = control.main([str(run.directory), *words])
    return Said(code, out.getvalue(), err.getvalue())


def status(run: LaunchedRun) -> dict[str, Any]:
    said = command(run, "status", "--json")
    assert (said.code, said.err) == (0, "")
    found: dict[str, Any] = json.loads(said.out, parse_constant=pytest.fail)
    return found


def is_all_ready(run: LaunchedRun) -> bool:
    return all(entry["state"] == "ready" for entry in status(run)["actors"])


def test_status_shows_actors_rings_and_figures(long_run: LaunchedRun) -> None:
    found = status(long_run)
    assert [(entry["name"], entry["state"]) for entry in found["actors"]] == [
        (name, "ready") for name in ("exchange", "target-0", "target-1", "drafter-0", "drafter-1")
    ]
    assert all([entry["pid"]] == long_run.pids(entry["name"]) for entry in found["actors"])
    assert [ring["target"] for ring in found["rings"]] == ["target-0", "target-1"]
    assert {state for ring in found["rings"] for state in ring["slots"]} <= {"free", "writing", "ready", "reading"}
    assert found["step"] >= 3 and found["loss"] > 0 and found["acceptance"] >= 1.0
    line = [sys.executable, "-m", "launch.control", str(long_run.directory), "status"]
    text = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for word in (str(long_run.directory), "running", "drafter-1", "ring of target-1", "tokens/s"):
        assert word in text


def test_the_socket_is_the_owners_alone(long_run: LaunchedRun) -> None:
    path = control_path(long_run.directory)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    files = [file for file in long_run.directory.rglob("*") if file.is_file()]
    assert [file for file in files if file.stat().st_mode & 0o077] == []


def test_status_answers_while_actors_hang(long_run: LaunchedRun) -> None:
    names = ("exchange", "target-0", "drafter-0")
    frozen = freeze(long_run, *names)
    first, second = (
        {entry["name"]: entry["progress_age_s"] for entry in status(long_run)["actors"] if entry["name"] in names}
        for _ in range(2)
    )
    thaw(frozen)
    assert all(second[name] > first[name] for name in names)


def test_no_end_that_an_operator_wants_counts_as_a_crash(long_run: LaunchedRun) -> None:
    """With supervision.max_restarts=0 the first crash of an actor would end the run."""
    ends = {"target-0": "restart", "target-1": "kill", "exchange": "restart", "drafter-1": "kill"}
    before = {name: long_run.pid(name) for name in ends}
    for name, verb in ends.items():
        said = command(long_run, verb, name)
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith(f"{name} (pid {before[name]}) is ")
    long_run.wait_until(lambda: is_all_ready(long_run) and all(long_run.pids(name) != [before[name]] for name in ends))
    assert status(long_run)["restarts"] == 4
    exits = {entry["name"]: entry["last_exit"] for entry in status(long_run)["actors"]}
    assert exits == {
        "exchange": "exit code 0",
        "target-0": "exit code 4",
        "target-1": "signal SIGKILL",
        "drafter-0": None,
        "drafter-1": "signal SIGKILL",
    }
    long_run.wait_for_step(max(long_run.losses()) + 2)


def test_what_cannot_be_done_is_refused(long_run: LaunchedRun) -> None:
    refusal = "error: needed one of exchange, target-0, target-1, drafter-0, drafter-1, found 'target-7'\n"
    for verb in ("restart", "kill", "stack"):
        assert command(long_run, verb, "target-7") == (1, "", refusal)
    said = command(long_run, "logs", "target-7")
    assert said.code == 2 and "needed a log of one of drafter-0, drafter-1, exchange, target-0, target-1" in said.err


@pytest.mark.parametrize("data", [b"", b"\xc1", b"garbage", wire.encode({"type": "Explode"}), b"\x91" * 10000])
def test_messages_that_are_none_are_answered_and_change_nothing(long_run: LaunchedRun, data: bytes) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(f"ipc://{control_path(long_run.directory)}")
        socket.send(data)
        assert socket.poll(60_000)
        reply = control_messages.decode_reply(socket.recv())
    assert isinstance(reply, Refused) and "needed a message" in reply.reason
    assert status(long_run)["state"] == "running"


def test_huge_frames_are_not_taken_into_memory(long_run: LaunchedRun) -> None:
    assert long_run._process is not None
    supervisor = long_run._process.pid
    before = peak_bytes(supervisor)
    send_huge_frames(f"ipc://{control_path(long_run.directory)}")
    assert status(long_run)["state"] == "running"
    assert peak_bytes(supervisor) - before < BOUND_BYTES


def test_top_is_live(long_run: LaunchedRun) -> None:
    ours, theirs = pty.openpty()
    line = [sys.executable, "-m", "launch.control", str(long_run.directory), "top"]
    top = subprocess.Popen(line, cwd=ROOT, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"})
    os.close(theirs)
    seen = b""
    while seen.count(b"ring of target-1") < 2:
        seen += os.read(ours, 65536)
    top.send_signal(signal.SIGINT)
    assert top.wait(60) == 0
    os.close(ours)
    assert b"drafter-1" in seen and b"tokens/s" in seen


def test_an_actor_shows_its_stacks(long_run: LaunchedRun) -> None:
    said = command(long_run, "stack", "exchange")
    assert (said.code, said.err) == (0, "")
    assert "most recent call first" in said.out and "in run_actor" in said.out
    assert said.out in long_run.log("exchange")


def test_logs_and_the_run_found_by_itself(
    long_run: LaunchedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    for names in ([], ["first", "second"]):
        for name in names:
            (runs / name).mkdir(parents=True)
            (runs / name / "control.sock").symlink_to(control_path(long_run.directory))
        assert control.main(["logs", "exchange"]) == 2
        listed = "".join(f"\n  {runs / name}" for name in names)
        expected = f"error: needed RUN or exactly one run that is alive in runs, found {len(names)}{listed}\n"
        assert capsys.readouterr().err == expected
    (runs / "first" / "control.sock").unlink()
    (runs / "first" / "control.sock").touch()  # a file at which nobody listens
    shutil.copytree(long_run.directory / "logs", runs / "second" / "logs")
    assert control.main(["logs", "exchange"]) == 0
    assert capsys.readouterr().out == (runs / "second" / "logs" / "exchange.log").read_text()


def test_stop_saves_and_ends_the_run(long_run: LaunchedRun) -> None:
    assert command(long_run, "stop") == (0, "the run is being stopped\n", "")
    assert long_run.end() == 143, long_run.log_tails()
    last = max(long_run.steps())
    assert (long_run.directory / "checkpoints" / f"step-{last:08}").is_dir()
    none = f"error: {long_run.directory}: needed a run that is alive, found nobody at control.sock\n"
    assert command(long_run, "status") == (2, "", none)

    report = json.loads((long_run.directory / "report.json").read_text(), parse_constant=pytest.fail)
    assert (report["cause"], report["exit_code"], report["reason"]) == ("stopped", 143, "signal SIGTERM")
    assert (report["step"], report["loss_last"]) == (last, long_run.losses()[last])
    restarts = {entry["name"]: entry["restarts"] for entry in report["actors"]}
    assert restarts == {"exchange": 1, "target-0": 1, "target-1": 1, "drafter-0": 0, "drafter-1": 1}
    assert all((entry["lost_s"] > 0) == (entry["restarts"] > 0) for entry in report["actors"])
    line = report["resume"].split()
    assert line[:3] == ["python", "-m", "launch.start_all"]
    assert line[4:6] == ["--run-dir", str(long_run.directory)]
    assert "plan.epochs=1000" in line
