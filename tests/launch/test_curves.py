"""The curves of a run, from metrics as the drafters write them."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

from common import config as configuration
from common.acceptance import Acceptance, Evaluation, SelectorReport, SetAcceptance
from common.metrics import MetricsWriter
from launch.curves import _draw_whole, draw_curves, main, read_evaluations

ROOT = Path(__file__).parents[2]


def acceptance_of(length: float) -> Acceptance:
    shares = [(length - 1) / 2, (length - 1) / 2]
    return Acceptance(acceptance=length, acceptance_per_position=shares, num_rounds=10, num_tokens=round(10 * length))


def evaluation(step: int) -> Evaluation:
    length = 1 + step / 20
    part = acceptance_of(length)
    categories = {"maths": part, "songs": part} if step else {"maths": part}  # one is there from some step on only
    of_set = SetAcceptance(**msgspec.structs.asdict(part), categories=categories)
    sets = {"eval": of_set}
    return Evaluation(**msgspec.structs.asdict(part), step=step, acceptance_other_prompt=1.0, sets=sets)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    configuration.write(configuration.load(ROOT / "launch/configs/tiny.toml", []), tmp_path)
    return tmp_path


def test_evaluations_of_all_ranks_are_drawn(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, steps in enumerate(([0, 10], [10, 20])):
        writer = MetricsWriter(run_dir, f"drafter-{rank}")
        for step in steps:
            writer.write(step=step, loss=1.0)
            writer.write(**msgspec.structs.asdict(evaluation(step)))
    found = read_evaluations(run_dir)
    assert found == [evaluation(step) for step in (0, 10, 20)]
    assert main([str(run_dir), "--out", str(run_dir / "new/curves.png")]) == 0
    assert capsys.readouterr().out == f"{run_dir}/new/curves.png: 3 evaluations, 1.000 at step 0 to 2.000 at step 20\n"
    assert (run_dir / "new/curves.png").read_bytes().startswith(b"\x89PNG")
    before = (run_dir / "new/curves.png").stat().st_size
    draw_curves(found[:1], run_dir / "new/curves.png", "one point")
    assert (run_dir / "new/curves.png").stat().st_size != before


def test_the_selector_has_two_curves_of_its_own() -> None:
    selector = SelectorReport(acceptance_unary=1.5, acceptance_oracle=2.5, recall_per_position=[0.5, 0.5])
    axes = [Figure().subplots() for _ in range(2)]
    for each, found in zip(axes, (None, selector), strict=True):
        _draw_whole(each, [msgspec.structs.replace(evaluation(step), selector=found) for step in (0, 10)])
    plain, with_selector = ([np.asarray(line.get_ydata()).tolist() for line in each.get_lines()] for each in axes)
    assert len(plain) == 2
    assert with_selector == [*plain, [1.5, 1.5], [2.5, 2.5]]


def test_a_run_without_evaluations_is_an_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir), "--out", str(run_dir / "curves.png")]) == 2
    assert "needed an evaluation, found none (see data.eval_path)" in capsys.readouterr().err
    MetricsWriter(run_dir, "drafter-0").write(step=0, acceptance=1.5)
    assert main([str(run_dir), "--out", str(run_dir / "curves.png")]) == 2
    assert "needed records of steps and evaluations" in capsys.readouterr().err
    assert main([str(run_dir / "nowhere"), "--out", str(run_dir / "curves.png")]) == 2
    assert not (run_dir / "curves.png").exists()
