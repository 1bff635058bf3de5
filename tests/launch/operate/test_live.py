"""The live line and the summary, from figures written as the actors write them."""

from pathlib import Path

import msgspec
import pytest

from common import config as configuration
from common.acceptance import Acceptance, Evaluation, SetAcceptance
from common.actor.board import Board, Notices, Phase
from common.metrics import MetricsWriter
from common.ring import memory
from common.ring.slot_table import NOBODY, SlotRecord, SlotState, SlotTable
from launch.operate.live import LiveLine, fit
from launch.operate.pace import Pace
from launch.operate.summary import summarize
from launch.operate.topology import plan_topology
from tests.builders.launched_runs import CONFIG


def test_line_shows_figures_rates_and_time_left(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    topology = plan_topology(configuration.load(CONFIG, ["ring.num_slots=2"]))
    fd = memory.create("board", topology.board_bytes)
    board = Board(fd, len(topology.actors))
    table = SlotTable(memory.create("table", topology.table_bytes), 4)
    targets, drafter = [Notices(fd, place, 1) for place in (1, 2)], Notices(fd, 3, 1)
    pace = Pace(topology, board)
    live = LiveLine(pace, table)

    def show(num_restarts: int) -> None:
        pace.observe()
        live.show(num_restarts)

    targets[0].add(num_tokens=700)
    targets[1].add(num_tokens=300)
    drafter.add(num_tokens=500)
    drafter.show_step(4, 10, 0.5)
    now[0] += 9.0
    show(num_restarts=0)
    assert capsys.readouterr().out == ""  # a line every ten seconds where nobody watches
    now[0] += 1.0
    show(num_restarts=0)
    expected = "step 4/10  loss 0.5000  acceptance -  tok/s 100 > 50  ring 0/4  -  restarts 0  left ?\n"
    assert capsys.readouterr().out == expected

    board.wipe(1)  # a new life, which counts from 0
    for notices in (targets[1], drafter):
        notices.phase(Phase.READY)
    targets[1].add(waiting_s=20.0)
    targets[0].add(num_tokens=200)
    drafter.show_step(6, 10, 0.25)
    drafter.show_acceptance(1.5)
    table.write(3, SlotRecord(SlotState.READY, 1, 7, NOBODY))
    now[0] += 40.0
    show(num_restarts=2)
    verdict = "drafter bound (targets wait 25%, drafters 0%)"
    expected = f"step 6/10  loss 0.2500  acceptance 1.50  tok/s 5 > 0  ring 1/4  {verdict}  restarts 2  left 1:22\n"
    assert capsys.readouterr().out == expected

    drafter.show_step(7, 1000, 0.25)
    now[0] += 10.0
    show(num_restarts=2)
    assert capsys.readouterr().out.endswith("  left 4:41:21\n")  # 993 steps at 3 in 51 s


def write_evaluation(metrics: MetricsWriter, step: int, acceptance: float, control: float = 1.0) -> None:
    """Write what a drafter measures on one set without categories."""
    measured = Acceptance(acceptance=acceptance, acceptance_per_position=[0.9, 0.6], num_rounds=4, num_tokens=10)
    sets = {"eval": SetAcceptance(**msgspec.structs.asdict(measured), categories={})}
    evaluation = Evaluation(**msgspec.structs.asdict(measured), step=step, acceptance_other_prompt=control, sets=sets)
    metrics.write(**msgspec.to_builtins(evaluation))


def test_summary_of_a_run(tmp_path: Path) -> None:
    metrics = MetricsWriter(tmp_path, "drafter-0")
    write_evaluation(metrics, 0, 1.0)
    MetricsWriter(tmp_path, "drafter-1").write(step=1, loss=4.0)  # drafter-0 died before it wrote this one
    metrics.write(step=2, loss=3.0)
    write_evaluation(metrics, 2, 2.5, control=1.25)
    assert summarize(tmp_path, 2, is_done=True).splitlines() == [
        "loss                                   4.0000 -> 3.0000",
        "held-out acceptance length             1.000 before, 2.500 after training",
        "  with another prompt's hidden states  1.250; the hidden states carry 1.250",
        "  share of rounds by draft position    0.90 0.60",
    ]


def test_summary_of_a_run_that_never_stepped(tmp_path: Path) -> None:
    assert summarize(tmp_path, 2, is_done=False) == ""


@pytest.mark.parametrize(
    ("evaluated", "last_step", "is_done", "told"),
    [
        ([0], 7, False, "1.000 before training"),
        ([0, 4], 7, False, "1.000 before, 1.500 after step 4"),
        ([0, 7], 7, False, "1.000 before, 1.500 after step 7"),
        ([0, 7], 7, True, "1.000 before, 1.500 after training"),
        ([0, 4], 7, True, "1.000 before, 1.500 after step 4"),
        ([4], 7, False, "1.500 after step 4"),
    ],
)
def test_summary_claims_no_evaluation_that_was_not_made(
    tmp_path: Path, evaluated: list[int], last_step: int, is_done: bool, told: str
) -> None:
    metrics = MetricsWriter(tmp_path, "drafter-0")
    metrics.write(step=last_step, loss=3.0)
    for step in evaluated:
        write_evaluation(metrics, step, 1.5 if step else 1.0)
    assert f"held-out acceptance length             {told}\n" in summarize(tmp_path, 1, is_done=is_done)


def test_line_fits_the_terminal() -> None:
    """The verdict goes without its shares first, then ring, verdict, restarts and so on; step and time left stay."""
    parts = {
        "step": "step 4/10",
        "loss": "loss 0.5000",
        "acceptance": "acceptance 1.50",
        "tok/s": "tok/s 100 > 50",
        "ring": "ring 1/4",
        "waiting": "drafter bound (targets wait 25%, drafters 0%)",
        "restarts": "restarts 0",
        "left": "left 1:22",
    }
    whole = "  ".join(parts.values())
    assert fit(parts, len(whole)) == whole
    for width in range(len(whole)):
        assert len(fit(parts, width)) <= width
    assert fit(parts, len(whole) - 1) == whole.replace(" (targets wait 25%, drafters 0%)", "")
    assert fit(parts, 79) == "step 4/10  loss 0.5000  acceptance 1.50  tok/s 100 > 50  restarts 0  left 1:22"
    assert fit(parts, 20) == "step 4/10  left 1:22"
    assert fit(parts, 4) == "step"
