"""Draw how held-out acceptance grew in a run: `python -m launch.curves RUN --out FILE.png`.

In total with its control (another prompt's hidden states), by evaluation set and category, and by position in the block.
Exit codes: 0 done, 2 no such run, or nothing was measured in it.
"""

import argparse
import sys
from pathlib import Path

import msgspec
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from common import config as configuration
from common.acceptance import Evaluation
from common.errors import DataError
from common.run_dir import METRICS
from launch.arguments import make_parser, run_command
from launch.operate.report import read_series

_PER_ROUND = "tokens per verification round"


def read_evaluations(run_dir: Path) -> list[Evaluation]:
    """Return the evaluations of a run, by step.

    Raises:
        HeadraceError: no run, nothing measured in it, or metrics of another version.
    """
    _, found = read_series(run_dir, configuration.read(run_dir).num_drafters)
    if not found:
        raise DataError(f"{run_dir / METRICS}: needed an evaluation, found none (see data.eval_path)")
    return msgspec.convert(list(found.values()), list[Evaluation])


def draw_curves(evaluations: list[Evaluation], path: Path, title: str) -> None:
    """Write a PNG."""
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    whole, parts, positions = figure.subplots(1, 3)
    _draw_whole(whole, evaluations)
    _draw_parts(parts, evaluations)
    _draw_positions(positions, evaluations)
    for axes in (whole, parts, positions):
        axes.set(xlabel="optimizer step")
        axes.grid(alpha=0.3)
    figure.suptitle(title, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png", dpi=110)


def _draw_whole(axes: Axes, evaluations: list[Evaluation]) -> None:
    steps = [evaluation.step for evaluation in evaluations]
    axes.plot(steps, [evaluation.acceptance for evaluation in evaluations], marker=".", label="held-out")
    control = [evaluation.acceptance_other_prompt for evaluation in evaluations]
    axes.plot(steps, control, marker=".", color="gray", label="with another prompt's hidden states")
    if selectors := [(evaluation.step, evaluation.selector) for evaluation in evaluations if evaluation.selector]:
        of_steps = [step for step, _ in selectors]
        axes.plot(
            of_steps, [found.acceptance_unary for _, found in selectors], linestyle=":", label="unary: without the selector"
        )
        axes.plot(of_steps, [found.acceptance_oracle for _, found in selectors], linestyle=":", label="oracle: the best choice")
    axes.set(title="Acceptance length", ylabel=_PER_ROUND)
    axes.set_ylim(bottom=1)
    axes.legend()


def _draw_parts(axes: Axes, evaluations: list[Evaluation]) -> None:
    """Draw one line per set and category; a part that exists from some step on starts there."""
    series: dict[str, list[tuple[int, float]]] = {}
    for evaluation in evaluations:
        for name, found in evaluation.rows():
            series.setdefault(name, []).append((evaluation.step, found.acceptance))
    for name, points in series.items():
        axes.plot(*zip(*points, strict=True), marker=".", label=name, linewidth=1 if "/" in name else 2)
    axes.set(title="By set and category", ylabel=_PER_ROUND)
    axes.set_ylim(bottom=1)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)  # lines fill the frame from corner to corner


def _draw_positions(axes: Axes, evaluations: list[Evaluation]) -> None:
    steps = [evaluation.step for evaluation in evaluations]
    num_positions = len(evaluations[0].acceptance_per_position)
    for position in range(num_positions):
        shares = [evaluation.acceptance_per_position[position] for evaluation in evaluations]
        colour = colormaps["viridis"](position / max(num_positions - 1, 1))
        axes.plot(steps, shares, color=colour, label=f"{position + 1}")
    axes.set(title="By position in the block", ylabel="share of rounds that accept it", ylim=(0, 1.02))
    axes.legend(ncols=1 + num_positions // 8, fontsize=8)


def curves(options: argparse.Namespace) -> None:
    """Draw the curves and print their ends."""
    evaluations = read_evaluations(options.run)
    draw_curves(evaluations, options.out, options.run.absolute().name)
    ends = [f"{evaluation.acceptance:.3f} at step {evaluation.step}" for evaluation in (evaluations[0], evaluations[-1])]
    print(f"{options.out}: {len(evaluations)} evaluations, {ends[0]} to {ends[1]}")


def main(argv: list[str] | None = None) -> int:
    """Read the command line and draw."""
    parser = make_parser("curves", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.png")
    return run_command(curves, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
