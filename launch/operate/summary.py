"""What a run says at its end, from its metrics and its export folder."""

from pathlib import Path
from typing import Any

import msgspec

from common.acceptance import Evaluation, find_best
from common.errors import DataError
from common.metrics import read_metrics
from common.run_dir import EXPORT, actor_name, metrics_path


class _Stepped(msgspec.Struct):
    """The least that a record of a step holds."""

    step: int
    loss: float | None


def read_series(run_dir: Path, num_drafters: int) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
    """Return finite losses and evaluations by step, from all ranks: a rank that died misses what its peers have written.

    Raises:
        DataError: a line is neither torn by a kill nor a record of a drafter.
    """
    losses: dict[int, float] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for rank in range(num_drafters):
        name = actor_name("drafter", rank)
        for line in read_metrics(run_dir, name):
            try:
                if "acceptance" in line:
                    evaluations[msgspec.convert(line, Evaluation).step] = line
                elif "loss" in line:
                    record = msgspec.convert(line, _Stepped)
                    if record.loss is not None:
                        losses[record.step] = record.loss
            except msgspec.ValidationError as error:
                path = metrics_path(run_dir, name)
                raise DataError(f"{path}: needed records of steps and evaluations, found {line}: {error}") from error
    return dict(sorted(losses.items())), dict(sorted(evaluations.items()))


def describe_evaluation(evaluation: Evaluation) -> list[str]:
    """A line for the positions, one per set where there are several, and one per category."""
    positions = " ".join(f"{share:.2f}" for share in evaluation.acceptance_per_position)
    lines = [f"  share of rounds by draft position    {positions}"]
    rows = list(evaluation.rows())
    if len(rows) == 1:
        return lines
    return lines + [f"  {name:<37}{found.acceptance:.3f} in {found.num_rounds:,} rounds" for name, found in rows]


def first_and_last(evaluations: dict[int, dict[str, Any]]) -> tuple[float | None, float | None]:
    """Return the acceptance before the first step and the latest after one; None where that was not measured."""
    last = max(evaluations, default=0)
    before = evaluations[0]["acceptance"] if 0 in evaluations else None
    return before, evaluations[last]["acceptance"] if last else None


def _describe_acceptance(evaluations: dict[int, dict[str, Any]], is_last: bool) -> str:
    before, after = first_and_last(evaluations)
    parts = [] if before is None else [f"{before:.3f} before" + (" training" if after is None else "")]
    parts += [] if after is None else [f"{after:.3f} after {'training' if is_last else f'step {max(evaluations)}'}"]
    return ", ".join(parts)


def summarize(run_dir: Path, num_drafters: int, *, is_done: bool) -> str:
    """Return loss and held-out acceptance, their parts, the control, the best checkpoint, and where the drafter is.

    Args:
        run_dir: the run.
        num_drafters: its ranks.
        is_done: whether the training came to its end.
    """
    losses, by_step = read_series(run_dir, num_drafters)
    out = []
    if losses:
        first, last = losses[min(losses)], losses[max(losses)]
        out.append(f"loss                                   {first:.4f} -> {last:.4f}")
    if by_step:
        measured = msgspec.convert(by_step[max(by_step)], Evaluation)
        found, control = measured.acceptance, measured.acceptance_other_prompt
        is_last = is_done and max(by_step) >= max(losses, default=0)
        out.append(f"held-out acceptance length             {_describe_acceptance(by_step, is_last)}")
        out.append(f"  with another prompt's hidden states  {control:.3f}; the hidden states carry {found - control:.3f}")
        out += describe_evaluation(measured)
    if best := find_best(run_dir):
        out.append(f"best checkpoint                        step {best.step}: {best.acceptance:.3f}")
    if (run_dir / EXPORT / "config.json").exists():
        out.append(f"exported drafter                       {run_dir / EXPORT}")
    return "\n".join(out)
