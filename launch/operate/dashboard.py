"""The state of a run as a person reads it."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from launch.operate.control_messages import ActorStatus, RunStatus
from launch.operate.pace import format_time

_COLOURS = {"ready": "green", "starting": "yellow", "warming up": "yellow", "done": "cyan", "down": "red"}
_COLUMNS = ("actor", "state", "pid", "uptime", "restarts", "last exit", "progress")


def render(status: RunStatus) -> Group:
    """One table of actors, one line per ring, and the figures of the training."""
    return Group(Text(status.run_dir), _figures(status), _actors(status.actors), *_rings(status))


def _figures(status: RunStatus) -> Text:
    loss = "-" if status.loss is None else f"{status.loss:.4f}"
    acceptance = "-" if status.acceptance is None else f"{status.acceptance:.2f}"
    best = "" if status.best_step is None else f" (best {status.best_acceptance:.2f} at step {status.best_step})"
    skipped = f"  skipped {status.num_skipped}" if status.num_skipped else ""
    left = format_time(status.time_left_s)
    lines = [
        f"{status.state}  up {format_time(status.uptime_s)}  left {left}  restarts {status.restarts}",
        f"step {status.step}/{status.num_steps or '?'}  loss {loss}  acceptance {acceptance}{best}{skipped}",
        f"tokens/s  targets {status.target_tokens_per_s:.0f}  drafters {status.drafter_tokens_per_s:.0f}",
    ]
    if status.verdict is not None:
        lines.append(f"{status.verdict}  (targets wait {status.targets_waiting:.0%}, drafters {status.drafters_waiting:.0%})")
    return Text("\n".join(lines))


def _actors(actors: list[ActorStatus]) -> Table:
    table = Table(*_COLUMNS, box=None, pad_edge=False)
    for actor in actors:
        table.add_row(
            actor.name,
            Text(actor.state, style=_COLOURS[actor.state]),
            str(actor.pid or "-"),
            "-" if actor.uptime_s is None else format_time(actor.uptime_s),
            str(actor.restarts),
            actor.last_exit or "-",
            "-" if actor.progress_age_s is None else f"{actor.progress_age_s:.1f} s ago",
        )
    return table


def _rings(status: RunStatus) -> list[Text]:
    return [Text(f"ring of {ring.target}  {' '.join(ring.slots)}") for ring in status.rings]
