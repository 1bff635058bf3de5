"""The summary of a run, from metrics as the drafters write them."""

from pathlib import Path

import msgspec
import pytest

from common.acceptance import Acceptance, Evaluation, SelectorReport, SetAcceptance
from common.metrics import MetricsWriter
from launch.operate.report import summarize


def write_evaluation(
    metrics: MetricsWriter, step: int, acceptance: float, control: float = 1.0, selector: SelectorReport | None = None
) -> None:
    """Write what a drafter measures on one set without categories."""
    measured = Acceptance(acceptance=acceptance, acceptance_per_position=[0.9, 0.6], num_rounds=4, num_tokens=10)
    sets = {"eval": SetAcceptance(**msgspec.structs.asdict(measured), categories={})}
    evaluation = Evaluation(
        **msgspec.structs.asdict(measured), step=step, acceptance_other_prompt=control, sets=sets, selector=selector
    )
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


def test_summary_says_in_one_line_what_the_selector_adds(tmp_path: Path) -> None:
    found = SelectorReport(acceptance_unary=1.25, acceptance_oracle=3.5, recall_per_position=[0.875, 0.5])
    write_evaluation(MetricsWriter(tmp_path, "drafter-0"), 2, 2.5, selector=found)
    assert (
        summarize(tmp_path, 1, is_done=True).splitlines()[-1]
        == "  unary, oracle; recall by position    1.250, 3.500; 0.88 0.50"
    )


def test_summary_of_a_run_that_never_stepped(tmp_path: Path) -> None:
    assert summarize(tmp_path, 2, is_done=False) == ""


@pytest.mark.parametrize(
    ("evaluated", "last_step", "is_done", "shown"),
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
    tmp_path: Path, evaluated: list[int], last_step: int, is_done: bool, shown: str
) -> None:
    metrics = MetricsWriter(tmp_path, "drafter-0")
    metrics.write(step=last_step, loss=3.0)
    for step in evaluated:
        write_evaluation(metrics, step, 1.5 if step else 1.0)
    assert f"held-out acceptance length             {shown}\n" in summarize(tmp_path, 1, is_done=is_done)
