"""The life of an actor as a real process, from its command line to its exit code."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import zmq

from common import wire
from common.actor import messages
from common.actor.board import Phase
from common.actor.lifecycle import EXIT_DONE, EXIT_FAILED, EXIT_HOPELESS, EXIT_STOPPED, start_time
from common.actor.messages import Hello, Reply, Welcome
from common.run_dir import exchange_address
from tests.builders.actor_stage import WAIT_S, Stage

RAISE_BESIDE = """
    def fail():
        raise RuntimeError("the thread broke")
    actor.start_thread("beside", fail)
    while True:
        actor.keep_waiting()
        time.sleep(0.01)
"""
ASK = "    actor.join()\n    ready(actor)\n    actor.ask(Next(0))"


def test_an_actor_that_is_done(stage: Stage) -> None:
    code, log = stage.run('    assert actor.args.extra == "word"\n    actor.metrics.write(step=1)\n    ready(actor)')
    assert code == EXIT_DONE == 0
    first, last = log.splitlines()
    assert re.fullmatch(r"\S+ \S+ I ---- drafter-3 started, pid \d+ ----", first) and last.endswith(" I done")
    assert (stage.board.read(0).pid, stage.board.read(0).phase) == (stage.started[0].pid, Phase.READY)
    assert (stage.run_dir / "metrics" / "drafter-3.jsonl").read_text() == '{"step":1}\n'


def test_a_failure_is_1_and_leaves_its_traceback(stage: Stage) -> None:
    code, log = stage.run('    raise RuntimeError("broken")')
    assert code == EXIT_FAILED == 1
    assert "Traceback" in log and log.endswith("RuntimeError: broken\n")


def test_a_protocol_error_is_worth_a_restart(stage: Stage) -> None:
    assert stage.run('    raise errors.ProtocolError("odd")')[0] == EXIT_FAILED


@pytest.mark.parametrize(
    "name", ["ConfigError", "DataError", "ModelError", "CheckpointError", "RunDirectoryBusyError", "TrainingDivergedError"]
)
def test_what_a_restart_cannot_mend_is_2_and_one_line(stage: Stage, name: str) -> None:
    code, log = stage.run(f'    raise errors.{name}("data.path: needed this, found that")')
    assert code == EXIT_HOPELESS == 2
    assert "Traceback" not in log and log.splitlines()[1].endswith(" E data.path: needed this, found that")
    assert len(log.splitlines()) == 2


def test_a_run_directory_without_a_configuration_is_hopeless(stage: Stage) -> None:
    (stage.run_dir / "config.json").unlink()
    code, log = stage.run("    pass")
    assert code == EXIT_HOPELESS and "config.json: cannot be read" in log and "Traceback" not in log


def test_an_actor_that_was_stopped_ends_with_4(stage: Stage) -> None:
    body = "    ready(actor)\n    while not actor.stopping:\n        time.sleep(0.01)\n    raise StoppedError"
    child = stage.start(body)
    stage.wait_until_ready()
    child.send_signal(signal.SIGINT)  # Ctrl-C reaches the whole terminal; it is the supervisor's to answer
    child.send_signal(signal.SIGTERM)
    assert child.wait(WAIT_S) == EXIT_STOPPED == 4
    assert stage.log.read_text().endswith(" I stopped\n")


def test_sigterm_ends_a_wait_for_an_exchange_that_is_not_there(stage: Stage) -> None:
    child = stage.start("    ready(actor)\n    actor.join()")
    stage.wait_until_ready()
    child.send_signal(signal.SIGTERM)
    assert child.wait(WAIT_S) == EXIT_STOPPED
    assert stage.board.read(0).waiting_s > 0


def test_sigterm_ends_a_wait_for_an_answer_and_the_wait_shows_as_progress(stage: Stage) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind(exchange_address(stage.run_dir))
        child = stage.start(ASK)
        assert socket.poll(WAIT_S * 1000)
        identity, data = socket.recv_multipart()
        hello = messages.decode_request(data)
        assert (hello.sender.pid, hello.sender.start_time) == (child.pid, start_time(child.pid))
        assert (hello.sender.role, hello.sender.index, hello.body) == ("drafter", 3, Hello(messages.PROTOCOL_VERSION))
        socket.send_multipart([identity, wire.encode(Reply(hello.id, Welcome(b"p" * 16, 1, 1)))])
        stage.wait_until_ready()
        before = stage.board.read(0).progress_s
        stage.wait_until(lambda: stage.board.read(0).progress_s > before)
        child.send_signal(signal.SIGTERM)
        assert child.wait(WAIT_S) == EXIT_STOPPED


def test_a_wait_is_counted_while_it_passes(stage: Stage) -> None:
    body = """
    with actor.waiting():
        ready(actor)
        while not actor.stopping:
            actor.keep_waiting()
            time.sleep(0.01)
"""
    child = stage.start(body)
    stage.wait_until(lambda: stage.board.read(0).waiting_s > 0.1)
    child.send_signal(signal.SIGTERM)
    assert child.wait(WAIT_S) == EXIT_DONE


def test_only_the_part_of_a_wait_counts_in_which_the_device_is_idle(stage: Stage) -> None:
    body = """
    with actor.waiting(lambda: float("inf")):
        for _ in range(10):
            actor.keep_waiting()
            time.sleep(0.01)
    assert actor.board.read(0).waiting_s == 0
    began = time.monotonic()
    with actor.waiting(lambda: began + 0.05):
        for _ in range(10):
            actor.keep_waiting()
            time.sleep(0.01)
    waited_s = time.monotonic() - began
    assert 0 < actor.board.read(0).waiting_s <= waited_s - 0.05
"""
    code, log = stage.run(body)
    assert code == EXIT_DONE, log


def test_an_exception_beside_the_main_thread_ends_the_process(stage: Stage) -> None:
    code, log = stage.run(RAISE_BESIDE)
    assert code == EXIT_FAILED
    assert "Traceback" in log and log.endswith("RuntimeError: the thread broke\n")


def test_an_exception_beside_ends_a_wait_for_the_exchange(stage: Stage) -> None:
    body = RAISE_BESIDE.partition("    while")[0] + "    actor.join()"
    code, log = stage.run(body)
    assert code == EXIT_FAILED and log.endswith("RuntimeError: the thread broke\n")


def test_a_thread_that_is_inside_torch_does_not_change_how_the_process_ends(stage: Stage) -> None:
    """Joined by nobody, as a collective whose peer died; it comes back to Python while the process ends."""
    body = """
    import torch
    def compute():
        matrix = torch.ones(64, 64)
        while True:
            matrix @ matrix
            actor.notices.phase(Phase.READY)
    actor.start_thread("beside", compute)
    while actor.board.read(0).phase != Phase.READY:
        time.sleep(0.01)
    raise StoppedError
"""
    code, log = stage.run(body)
    assert code == EXIT_STOPPED, log
    assert log.endswith(" I stopped\n")


def test_sigusr1_shows_all_stacks_and_the_actor_goes_on(stage: Stage) -> None:
    body = """
    def beside():
        ready(actor)
        while not actor.stopping:
            time.sleep(0.01)
    thread = actor.start_thread("beside", beside)
    thread.join()
"""
    child = stage.start(body)
    stage.wait_until_ready()
    child.send_signal(signal.SIGUSR1)
    stage.wait_until(lambda: log_has_stacks(stage.log))
    assert child.poll() is None
    child.send_signal(signal.SIGTERM)
    assert child.wait(WAIT_S) == EXIT_DONE


def log_has_stacks(log: Path) -> bool:
    text = log.read_text()
    return " in beside\n" in text and " in main\n" in text


def test_the_start_time_distinguishes_two_processes_of_a_pid() -> None:
    child = subprocess.Popen(["sleep", "600"])
    assert start_time(child.pid) >= start_time(os.getpid()) > 0
    assert start_time(child.pid) == start_time(child.pid)
    child.kill()
    child.wait()
    with pytest.raises(FileNotFoundError):
        start_time(child.pid)


def test_a_process_may_have_any_name() -> None:
    """The name stands in parentheses before the field that counts, and may hold some itself."""
    program = "import time; from pathlib import Path; Path('/proc/self/comm').write_text('a) b (c) 1'); print(flush=True)"
    child = subprocess.Popen([sys.executable, "-c", program + "; time.sleep(600)"], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        child.stdout.readline()
    assert "(a) b (c) 1)" in Path(f"/proc/{child.pid}/stat").read_text()
    assert start_time(os.getpid()) <= start_time(child.pid) < start_time(os.getpid()) + 10**6
    child.kill()
    child.wait()
