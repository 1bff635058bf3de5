"""`<run>/report.json`: how a run ended, why, what it came to, and how to go on."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from common.acceptance import Evaluation, find_best
from common.config import Config
from common.run_dir import report_path, write_json
from launch.operate.control_messages import RunStatus
from launch.operate.summary import first_and_last, read_series
from services.exchange.plan import Plan

Cause = Literal["done", "stopped", "gave up", "bad input", "supervisor failed"]


class Ending(NamedTuple):
    """What ended a run."""

    cause: Cause
    exit_code: int
    reason: str = ""
    actor: str | None = None  # whose end it was
    last_lines: Sequence[str] = ()


class ActorReport(msgspec.Struct, kw_only=True):
    """One actor over the whole run."""

    name: str
    restarts: int
    lost_s: float  # from its last progress until it was ready again, over all its deaths
    last_exit: str | None


class Report(msgspec.Struct, kw_only=True):
    """The content of the file."""

    cause: Cause
    exit_code: int
    reason: str
    actor: str | None
    last_lines: Sequence[str]
    uptime_s: float  # of this start of the run
    step: int
    num_steps: int
    num_samples: int
    anchors_per_batch: int | None  # None where they were to be chosen and were not
    num_skipped: int  # steps that were not finite, see quarantine/
    loss_first: float | None
    loss_last: float | None
    acceptance_first: float | None  # before the first step
    acceptance_last: float | None  # the latest after a step
    evaluation_last: dict[str, Any] | None  # as in the metrics: by position, evaluation set and category
    evaluation_best: Evaluation | None  # of the checkpoint of the highest acceptance
    actors: list[ActorReport]
    resume: str | None  # the command that goes on; None where there is nothing left to do


def write_report(run_dir: Path, ending: Ending, status: RunStatus, plan: Plan, config: Config, command: str) -> None:
    """Write the file in one piece.

    Args:
        run_dir: the run.
        ending: what ended it.
        status: its last state.
        plan: its sequence.
        config: its settings.
        command: that starts the run again.

    Raises:
        OSError: the disk refuses.
    """
    losses, evaluations = read_series(run_dir, config.num_drafters)
    measured = list(evaluations.values())
    acceptance_first, acceptance_last = first_and_last(evaluations)
    step = max([status.step, *losses])
    report = Report(
        **ending._asdict(),
        uptime_s=status.uptime_s,
        step=step,
        num_steps=plan.num_steps,
        num_samples=plan.num_samples(step),
        anchors_per_batch=config.train.anchors_per_batch,
        num_skipped=status.num_skipped,
        loss_first=losses[min(losses)] if losses else None,
        loss_last=losses[max(losses)] if losses else None,
        acceptance_first=acceptance_first,
        acceptance_last=acceptance_last,
        evaluation_last=measured[-1] if measured else None,
        evaluation_best=find_best(run_dir),
        actors=[
            ActorReport(name=actor.name, restarts=actor.restarts, lost_s=actor.lost_s, last_exit=actor.last_exit)
            for actor in status.actors
        ],
        resume=None if ending.cause == "done" else command,
    )
    write_json(report_path(run_dir), report)
