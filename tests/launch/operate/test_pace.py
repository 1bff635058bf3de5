"""The side that bounds a run, from the waiting times of its actors."""

import pytest

from common import config as configuration
from common.actor.board import Board, Notices, Phase
from common.ring import memory
from launch.operate.pace import Pace, Waiting
from launch.operate.topology import plan_topology
from tests.builders.launched_runs import CONFIG


@pytest.mark.parametrize(
    ("targets", "drafters", "verdict"),
    [
        (0.9, 0.0, "drafter bound"),
        (0.11, 0.0, "drafter bound"),
        (0.0, 0.95, "target bound"),
        (0.3, 0.25, "balanced"),
        (0.0, 0.0, "balanced"),
    ],
)
def test_the_side_that_waits_less_bounds_the_run(targets: float, drafters: float, verdict: str) -> None:
    assert Waiting(targets, drafters).verdict() == verdict


def test_shares_are_of_the_window_and_of_all_actors_of_a_side(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    topology = plan_topology(configuration.load(CONFIG, []))  # two targets, two drafters
    fd = memory.create("board", topology.board_bytes)
    board, notices = Board(fd, 5), [Notices(fd, record, 1) for record in range(5)]
    pace = Pace(topology, board)

    def pass_time(seconds: float, **waits: float) -> None:
        for name, share in waits.items():
            notices[int(name[1:])].add(waiting_s=share * seconds)
        now[0] += seconds
        pace.observe()

    pass_time(5.0)
    assert pace.waiting() is None  # nobody is ready
    for record in (1, 3):
        notices[record].phase(Phase.READY)
    pass_time(5.0, a1=1.0, a2=0.0, a3=0.5, a4=0.5)
    assert pace.waiting() == Waiting(0.25, 0.25)  # over ten seconds
    pass_time(40.0, a1=1.0, a2=1.0)
    assert pace.waiting() == Waiting(1.0, 0.0)  # what was before the window is forgotten
    board.wipe(1)
    pass_time(40.0, a1=0.5, a3=1.0, a4=1.0)
    assert pace.waiting() is None  # the only target that was ready has died
    notices[2].phase(Phase.READY)
    assert pace.waiting() == Waiting(0.25, 1.0)


def test_rates_and_time_left_go_on_over_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    topology = plan_topology(configuration.load(CONFIG, []))
    fd = memory.create("board", topology.board_bytes)
    board, notices = Board(fd, 5), [Notices(fd, record, 1) for record in range(5)]
    pace = Pace(topology, board)

    def pass_time(seconds: float) -> None:
        now[0] += seconds
        pace.observe()

    assert (pace.tokens_per_s("target"), pace.time_left_s()) == (0.0, None)
    notices[1].add(num_tokens=700)
    notices[2].add(num_tokens=300)
    notices[3].add(num_tokens=500)
    notices[3].show_step(4, 10, 0.5)
    pass_time(10.0)
    assert (pace.tokens_per_s("target"), pace.tokens_per_s("drafter")) == (100.0, 50.0)
    assert pace.time_left_s() is None  # before the second step
    board.wipe(1)  # a new incarnation counts from 0
    notices[1].add(num_tokens=200)
    notices[3].show_step(6, 10, 0.25)
    pass_time(40.0)
    assert (pace.tokens_per_s("target"), pace.tokens_per_s("drafter")) == (5.0, 0.0)
    assert pace.time_left_s() == 80.0  # 4 steps at 2 in 40 s
