"""Single decisions of the supervisor and its children, with real processes and shared memory."""

import os
import signal
from pathlib import Path

import pytest

from common import config as configuration
from common import memory
from common.board import Board, Notices, Phase
from common.slot_table import Owner
from launch.child import Child, Exit, wait_for_exit
from launch.supervisor import Supervisor
from launch.topology import SharedFds, plan_topology
from tests.launch.launched_runs import CONFIG

CONFIGURATION = configuration.load(CONFIG, ["supervision.max_restarts=2"])
TOPOLOGY = plan_topology(CONFIGURATION)


@pytest.fixture
def fds() -> SharedFds:
    board = memory.create("board", TOPOLOGY.board_bytes)
    return SharedFds([], memory.create("control", TOPOLOGY.table_bytes), board)


def make_supervisor(fds: SharedFds, run_dir: Path) -> Supervisor:
    return Supervisor(CONFIGURATION, TOPOLOGY, fds, Board(fds.board, len(TOPOLOGY.actors)), run_dir)


def test_signals_to_a_child_that_has_ended_are_harmless(fds: SharedFds, tmp_path: Path) -> None:
    child = Child(TOPOLOGY.actors[0], tmp_path)
    child.start(fds)  # ends at once: the run directory has no config.json
    wait_for_exit([child], timeout_s=60)
    child.send(signal.SIGTERM)
    child.send(signal.SIGUSR1)
    child.send(signal.SIGKILL)
    exit_ = child.take_exit()
    assert exit_ is not None
    assert str(exit_) == "exit code 2"
    assert not child.alive
    assert child.take_exit() is None
    child.send(signal.SIGKILL)
    assert child.last_exit == exit_
    assert f"{tmp_path / 'config.json'}: cannot be read: No such file or directory" in child.log.read_text()


@pytest.mark.parametrize(("was_ready", "failure"), [(True, ""), (False, "target-0 ended with exit code 1")])
def test_who_fails_before_it_was_ever_ready_would_fail_again(
    fds: SharedFds, tmp_path: Path, was_ready: bool, failure: str
) -> None:
    """Also where it was ready for less than one look of the supervisor."""
    supervisor = make_supervisor(fds, tmp_path)
    target = supervisor.children[1]
    if was_ready:
        Notices(fds.board, target.spec.place, os.getpid()).phase(Phase.READY)
    supervisor._bury(target, Exit(1, Owner(1, 1)))
    assert supervisor.failure == failure
    assert supervisor.deaths.counts == ({"target-0": 1} if was_ready else {})
    supervisor._channel.close()


def test_restarts_are_counted_per_actor(fds: SharedFds, tmp_path: Path) -> None:
    supervisor = make_supervisor(fds, tmp_path)
    for child in (*supervisor.children[1:3], *supervisor.children[1:3]):
        supervisor._bury(child, Exit(-9, Owner(1, 1)))
    assert supervisor.failure == ""
    supervisor._bury(supervisor.children[2], Exit(-9, Owner(1, 1)))
    assert supervisor.failure == "target-1 ended 3 times within 60 s, last with signal SIGKILL"
    assert supervisor.culprit is supervisor.children[2]
    assert not supervisor.is_bad_input
    supervisor._channel.close()
