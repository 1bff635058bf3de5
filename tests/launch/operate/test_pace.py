"""What bounds a run, from what its actors say of their waiting."""

import pytest

from common import config as configuration
from common.actor.board import Board, Notices, Phase
from common.ring import memory
from launch.operate.pace import Pace, Waiting, format_time
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
    board, notices = Board(fd, 5), [Notices(fd, place, 1) for place in range(5)]
    pace = Pace(topology, board)

    def pass_time(seconds: float, **waits: float) -> None:
        for name, share in waits.items():
            notices[int(name[1:])].add(waiting_s=share * seconds)
        now[0] += seconds
        pace.observe()

    pass_time(5.0)
    assert pace.waiting() is None  # nobody is ready
    for place in (1, 3):
        notices[place].phase(Phase.READY)
    pass_time(5.0, a1=1.0, a2=0.0, a3=0.5, a4=0.5)
    assert pace.waiting() == Waiting(0.25, 0.25)  # over ten seconds
    pass_time(40.0, a1=1.0, a2=1.0)
    assert pace.waiting() == Waiting(1.0, 0.0)  # what was before the window is forgotten
    assert str(pace.waiting()) == "drafter bound (targets wait 100%, drafters 0%)"
    board.wipe(1)
    pass_time(40.0, a1=0.5, a3=1.0, a4=1.0)
    assert pace.waiting() is None  # the only target that was ready has died
    notices[2].phase(Phase.READY)
    assert pace.waiting() == Waiting(0.25, 1.0)


@pytest.mark.parametrize(("seconds", "text"), [(None, "?"), (0.4, "0:00"), (80.0, "1:20"), (16550.0, "4:35:50")])
def test_times_are_as_on_a_clock(seconds: float | None, text: str) -> None:
    assert format_time(seconds) == text
