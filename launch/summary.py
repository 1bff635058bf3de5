"""What a run says at its end, from its metrics and its export folder."""

from pathlib import Path
from typing import Any

import msgspec

from common.acceptance import Evaluation, find_best
from common.addresses import actor_name
from common.metrics import read_metrics


def read_series(run_dir: Path, num_drafters: int) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
    """Finite losses and evaluations by step, from all ranks: a rank that died misses what its peers have written."""
    losses: dict[int, float] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for rank in range(num_drafters):
        for line in read_metrics(run_dir, actor_name("drafter", rank)):
            if line.get("loss") is not None:
                losses[line["step"]] = line["loss"]
            elif "acceptance" in line:
                evaluations[line["step"]] = line
    return dict(sorted(losses.items())), dict(sorted(evaluations.items()))


def describe_evaluation(evaluation: Evaluation) -> list[str]:
    """A line for the positions, one per set where there are several, and one per category."""
    positions = " ".join(f"{share:.2f}" for share in evaluation.acceptance_per_position)
    lines = [f"  share of rounds by draft position    {positions}"]
    rows = list(evaluation.rows())
    if len(rows) == 1:
        return lines
    return lines + [f"  {name:<37}{found.acceptance:.3f} in {found.num_rounds:,} rounds" for name, found in rows]


def summarize(run_dir: Path, num_drafters: int) -> str:
    """Held-out acceptance before and after, its parts, the control, the best checkpoint, and where the drafter is."""
    losses, by_step = read_series(run_dir, num_drafters)
    evaluations = list(by_step.values())
    out = []
    if losses:
        first, last = losses[min(losses)], losses[max(losses)]
        out.append(f"loss                                   {first:.4f} -> {last:.4f}")
    if evaluations:
        before, measured = evaluations[0]["acceptance"], msgspec.convert(evaluations[-1], Evaluation)
        after, control = measured.acceptance, measured.acceptance_other_prompt
        out.append(f"held-out acceptance length             {before:.3f} before, {after:.3f} after training")
        out.append(f"  with another prompt's hidden states  {control:.3f}; the hidden states carry {after - control:.3f}")
        out += describe_evaluation(measured)
    if best := find_best(run_dir):
        out.append(f"best checkpoint                        step {best.step}: {best.acceptance:.3f}")
    if (run_dir / "export" / "config.json").exists():
        out.append(f"exported drafter                       {run_dir / 'export'}")
    return "\n".join(out)
