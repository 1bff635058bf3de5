"""Single decisions of the supervisor and its children, with real processes and shared memory."""

import os
import signal
from pathlib import Path

import pytest

from common import config as configuration
from common.actor.board import Board, Notices, Phase
from common.ring import memory
from common.ring.slot_table import Owner
from launch.operate.actor_state import State
from launch.operate.child import Child, Exit, wait_for_exit
from launch.operate.supervisor import Supervisor
from launch.operate.topology import SharedFds, plan_topology
from tests.builders.launched_runs import CONFIG

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
    """Also where it was ready for less than one tick of the supervisor."""
    supervisor = make_supervisor(fds, tmp_path)
    target = supervisor.children[1]
    if was_ready:
        Notices(fds.board, target.spec.record, os.getpid()).phase(Phase.READY)
    target.state = State.ALIVE
    supervisor._handle_exit(target, Exit(1, Owner(1, 1)))
    assert supervisor.failure == failure
    assert supervisor.deaths.counts == ({"target-0": 1} if was_ready else {})
    supervisor._channel.close()


def test_restarts_are_counted_per_actor(fds: SharedFds, tmp_path: Path) -> None:
    supervisor = make_supervisor(fds, tmp_path)
    for child in (*supervisor.children[1:3], *supervisor.children[1:3]):
        Notices(fds.board, child.spec.record, os.getpid()).add(num_batches=1)
        child.state = State.ALIVE
        supervisor._handle_exit(child, Exit(-9, Owner(1, 1)))
    assert supervisor.failure == ""
    Notices(fds.board, 2, os.getpid()).add(num_batches=1)
    supervisor.children[2].state = State.ALIVE
    supervisor._handle_exit(supervisor.children[2], Exit(-9, Owner(1, 1)))
    assert supervisor.failure == "target-1 ended 3 times within 60 s, last with signal SIGKILL"
    assert supervisor.culprit is supervisor.children[2]
    assert not supervisor.is_bad_input
    supervisor._channel.close()


def test_an_actor_that_starts_outlives_a_request_for_its_stacks(tmp_path: Path) -> None:
    """The run directory has no config.json, so the first actor that is far enough refuses its input."""
    rings = [memory.create("ring", TOPOLOGY.ring_bytes) for _ in range(TOPOLOGY.num_rings)]
    fds = SharedFds(rings, memory.create("control", TOPOLOGY.table_bytes), memory.create("board", TOPOLOGY.board_bytes))
    supervisor = make_supervisor(fds, tmp_path)
    before = signal.getsignal(signal.SIGUSR1)

    def request_stacks() -> None:
        for child in supervisor.children:
            child.send(signal.SIGUSR1)

    assert not supervisor.run(request_stacks)
    assert supervisor.failure.endswith("ended with exit code 2")
    assert {child.last_exit.code for child in supervisor.children if child.last_exit} <= {2, -signal.SIGKILL}
    assert signal.getsignal(signal.SIGUSR1) == before


def die(supervisor: Supervisor, fds: SharedFds, index: int, *, num_batches: int = 0, step: int = 0) -> str:
    """Let an incarnation show its figures and end; return why the run was given up."""
    child = supervisor.children[index]
    supervisor._board.wipe(index)
    notices = Notices(fds.board, index, os.getpid())
    notices.phase(Phase.READY)
    notices.add(num_batches=num_batches)
    notices.show_step(step, 10, 1.0)
    child.log.parent.mkdir(exist_ok=True)
    child.log.write_text("2026-11-29 12:00:00,000 E failed\nRuntimeError: no luck\n")
    child.state = State.ALIVE
    supervisor._handle_exit(child, Exit(1, Owner(1, 1)))
    return supervisor.failure


EXCHANGE, TARGET, OTHER_TARGET, DRAFTER, OTHER_DRAFTER = range(5)


@pytest.mark.parametrize(
    ("index", "ends", "others", "is_over"),
    [
        (TARGET, [(1, 0), (0, 0), (0, 0)], {}, True),  # it once made a batch, and then no more
        (TARGET, [(0, 0), (1, 0), (0, 0)], {}, False),
        (TARGET, [(0, 0), (0, 0), (0, 0)], {DRAFTER: (0, 5)}, False),  # the run goes on without it
        (TARGET, [(0, 0), (0, 0), (0, 0)], {OTHER_TARGET: (5, 0)}, True),  # batches that nobody trains on
        (DRAFTER, [(4, 7), (4, 7), (4, 6)], {}, True),  # the same steps again after every resume
        (DRAFTER, [(4, 7), (4, 8), (4, 8)], {}, False),
        (DRAFTER, [(0, 0), (0, 0), (0, 0)], {TARGET: (5, 0)}, True),  # batches that are made again for it
        (DRAFTER, [(0, 0), (0, 0), (0, 0)], {OTHER_DRAFTER: (0, 5)}, False),
        (EXCHANGE, [(0, 0), (0, 0), (0, 0)], {}, True),
        (EXCHANGE, [(0, 0), (0, 0), (0, 0)], {TARGET: (5, 0)}, False),
    ],
)
def test_deaths_in_a_row_without_progress_end_the_run(
    fds: SharedFds,
    tmp_path: Path,
    index: int,
    ends: list[tuple[int, int]],
    others: dict[int, tuple[int, int]],
    is_over: bool,
) -> None:
    """At any time: batches and steps of three incarnations of an actor, and what others come to before the last."""
    settings = configuration.load(CONFIG, ["supervision.max_restarts=100"])
    supervisor = Supervisor(settings, TOPOLOGY, fds, Board(fds.board, len(TOPOLOGY.actors)), tmp_path)
    for num_batches, step in ends[:-1]:
        assert die(supervisor, fds, index, num_batches=num_batches, step=step) == ""
    for other, (num_batches, step) in others.items():
        assert die(supervisor, fds, other, num_batches=num_batches, step=step) == ""
    num_batches, step = ends[-1]
    failure = die(supervisor, fds, index, num_batches=num_batches, step=step)
    name, times = TOPOLOGY.actors[index].name, "3 times without a new batch or step between"
    assert failure == (f"{name} ended {times}, last with exit code 1: RuntimeError: no luck" if is_over else "")
    supervisor._channel.close()
