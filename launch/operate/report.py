"""The end of a run: `<run>/report.json`, and the figures of its metrics for a person."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from common.acceptance import Evaluation, find_best
from common.config import Config
from common.errors import DataError
from common.metrics import read_metrics
from common.run_dir import EXPORT, actor_name, metrics_path, report_path, write_json
from launch.operate.control_messages import RunStatus
from services.exchange.plan import Plan

Cause = Literal["done", "stopped", "gave up", "bad input", "supervisor failed"]
_REPORTED = ("name", "restarts", "lost_s", "last_exit")  # of an actor


class Ending(NamedTuple):
    """Why and how a run ended."""

    cause: Cause
    exit_code: int
    reason: str = ""
    actor: str | None = None  # that caused it
    last_lines: Sequence[str] = ()


class _StepRecord(msgspec.Struct):
    step: int
    loss: float | None


def read_series(run_dir: Path, num_drafters: int) -> tuple[dict[int, float], dict[int, dict[str, Any]]]:
    """Return finite losses and evaluations by step, from all ranks: a rank that died lacks records that others have.

    Raises:
        DataError: a line is neither torn by a kill nor a record of a drafter.
    """
    losses: dict[int, float] = {}
    evaluations: dict[int, dict[str, Any]] = {}
    for name in (actor_name("drafter", rank) for rank in range(num_drafters)):
        for line in read_metrics(run_dir, name):
            try:
                if "acceptance" in line:
                    evaluations[msgspec.convert(line, Evaluation).step] = line
                elif "loss" in line and (record := msgspec.convert(line, _StepRecord)).loss is not None:
                    losses[record.step] = record.loss
            except msgspec.ValidationError as error:
                path = metrics_path(run_dir, name)
                raise DataError(f"{path}: needed records of steps and evaluations, found {line}: {error}") from error
    return dict(sorted(losses.items())), dict(sorted(evaluations.items()))


def write_report(run_dir: Path, ending: Ending, status: RunStatus, plan: Plan, config: Config, command: str) -> None:
    """Write report.json in one piece; `command` starts the run again. OSError where the disk refuses."""
    losses, evaluations = read_series(run_dir, config.num_drafters)
    acceptance_first, acceptance_last = _first_and_last(evaluations)
    step = max([status.step, *losses])
    report = {
        **ending._asdict(),
        "uptime_s": status.uptime_s,  # of this start of the run
        "step": step,
        "num_steps": plan.num_steps,
        "num_samples": plan.num_samples(step),
        "anchors_per_batch": config.train.anchors_per_batch,
        "num_skipped": status.num_skipped,  # steps that were not finite, see quarantine/
        "loss_first": losses[min(losses)] if losses else None,
        "loss_last": losses[max(losses)] if losses else None,
        "acceptance_first": acceptance_first,  # before the first step
        "acceptance_last": acceptance_last,  # the latest after a step
        "evaluation_last": evaluations[max(evaluations)] if evaluations else None,  # by position, set and category
        "evaluation_best": find_best(run_dir),  # of the checkpoint of the highest acceptance
        "actors": [{name: getattr(actor, name) for name in _REPORTED} for actor in status.actors],
        "resume": None if ending.cause == "done" else command,
    }
    write_json(report_path(run_dir), report)


def summarize(run_dir: Path, num_drafters: int, *, is_done: bool) -> str:
    """Return loss and held-out acceptance, their parts, the control, the best checkpoint, and the path of the drafter."""
    losses, evaluations = read_series(run_dir, num_drafters)
    out = []
    if losses:
        out.append(f"loss                                   {losses[min(losses)]:.4f} -> {losses[max(losses)]:.4f}")
    if evaluations:
        last = msgspec.convert(evaluations[max(evaluations)], Evaluation)
        is_last = is_done and last.step >= max(losses, default=0)
        carried = last.acceptance - last.acceptance_other_prompt
        out.append(f"held-out acceptance length             {_describe_growth(evaluations, is_last)}")
        out.append(
            f"  with another prompt's hidden states  {last.acceptance_other_prompt:.3f}; the hidden states carry {carried:.3f}"
        )
        out += describe_evaluation(last)
    if best := find_best(run_dir):
        out.append(f"best checkpoint                        step {best.step}: {best.acceptance:.3f}")
    if (run_dir / EXPORT / "config.json").exists():
        out.append(f"exported drafter                       {run_dir / EXPORT}")
    return "\n".join(out)


def describe_evaluation(evaluation: Evaluation) -> list[str]:
    """Return a line for the positions, one for a selector, one per set where there are several, and one per category."""
    lines = [f"  share of rounds by draft position    {_join(evaluation.acceptance_per_position)}"]
    if (selector := evaluation.selector) is not None:
        acceptances = f"{selector.acceptance_unary:.3f}, {selector.acceptance_oracle:.3f}"
        lines.append(f"  unary, oracle; recall by position    {acceptances}; {_join(selector.recall_per_position)}")
    rows = list(evaluation.rows())
    if len(rows) > 1:
        lines += [f"  {name:<37}{found.acceptance:.3f} in {found.num_rounds:,} rounds" for name, found in rows]
    return lines


def _join(shares: Sequence[float]) -> str:
    return " ".join(f"{share:.2f}" for share in shares)


def _first_and_last(evaluations: dict[int, dict[str, Any]]) -> tuple[float | None, float | None]:
    """Return the acceptance before the first step and the latest after one; None where that was not measured."""
    last = max(evaluations, default=0)
    before = evaluations[0]["acceptance"] if 0 in evaluations else None
    return before, evaluations[last]["acceptance"] if last else None


def _describe_growth(evaluations: dict[int, dict[str, Any]], is_last: bool) -> str:
    before, after = _first_and_last(evaluations)
    if after is None:
        return f"{before:.3f} before training"
    start = "" if before is None else f"{before:.3f} before, "
    return f"{start}{after:.3f} after {'training' if is_last else f'step {max(evaluations)}'}"
