"""The state of a run as a person reads it: the live line of `launch.start_all`, the tables of `launch.control`."""

import os
import shutil
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

from rich.console import Group
from rich.table import Table
from rich.text import Text

from launch.operate.control_messages import ActorStatus, DeviceStatus, RunStatus

_FIRST_TO_GO = ("ring", "waiting", "restarts", "tok/s", "acceptance", "loss")  # where the terminal is narrow
_GIB = 2**30
_INTERVAL_S = 1.0
_INTERVAL_PIPED_S = 10.0
_COLOURS = {"ready": "green", "starting": "yellow", "warming up": "yellow", "done": "cyan", "down": "red"}
_COLUMNS = ("actor", "state", "pid", "uptime", "restarts", "last exit", "progress", "devices")


def show(text: str, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print to the standard output, or to `stream`; where its terminal or reader is gone, drop this and all later text.

    A run must not die of it: SIGHUP comes with a terminal that refuses every write.
    """
    stream = stream or sys.stdout
    try:
        print(text, end=end, file=stream, flush=True)
    except OSError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class LiveLine:
    """One line, written over in a terminal, appended every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last_s = time.monotonic()

    def show(self, read: Callable[[], RunStatus]) -> None:
        """Print the line where it is time for one."""
        now = time.monotonic()
        if now - self._last_s < (_INTERVAL_S if self._is_terminal else _INTERVAL_PIPED_S):
            return
        self._last_s = now
        parts = compose(read())
        if self._is_terminal:
            show(f"\r{fit(parts, shutil.get_terminal_size().columns - 1)}\033[K", end="")
        else:
            show("  ".join(parts.values()))

    def end(self) -> None:
        """Leave the line as it stands."""
        if self._is_terminal:
            show("")


def compose(status: RunStatus) -> dict[str, str]:
    """Return the parts of the live line by name."""
    slots = [state for ring in status.rings for state in ring.slots]
    verdict = "-"
    if status.verdict is not None:
        verdict = f"{status.verdict} (targets wait {status.targets_waiting:.0%}, drafters {status.drafters_waiting:.0%})"
    return {
        "step": f"step {status.step}/{status.num_steps or '?'}",
        "loss": "loss -" if status.loss is None else f"loss {status.loss:.4f}",
        "acceptance": "acceptance -" if status.acceptance is None else f"acceptance {status.acceptance:.2f}",
        "tok/s": f"tok/s {status.target_tokens_per_s:.0f} > {status.drafter_tokens_per_s:.0f}",
        "ring": f"ring {sum(state != 'free' for state in slots)}/{len(slots)}",
        "waiting": verdict,
        "restarts": f"restarts {status.restarts}",
        "left": f"left {format_time(status.time_left_s)}",
    }


def fit(parts: dict[str, str], width: int) -> str:
    """Return the parts as one line of at most `width` characters: the verdict without its shares, then fewer parts."""
    short = parts | {"waiting": parts["waiting"].partition(" (")[0]}
    lines = ["  ".join(parts.values())]
    for count in range(len(_FIRST_TO_GO) + 1):
        lines.append("  ".join(text for name, text in short.items() if name not in _FIRST_TO_GO[:count]))
    return next((line for line in lines if len(line) <= width), lines[-1][:width])


def render(status: RunStatus) -> Group:
    """Return the figures of the training, one table of actors, and one line per ring."""
    rings = [Text(f"ring of {ring.target}  {' '.join(ring.slots)}") for ring in status.rings]
    return Group(Text(status.run_dir), _figures(status), _actors(status.actors), *rings)


def format_time(seconds: float | None) -> str:
    """Format as hours, minutes and seconds, 4:35:50; ? where it is not known."""
    return "?" if seconds is None else str(timedelta(seconds=round(seconds)))


def _figures(status: RunStatus) -> Text:
    parts = compose(status)
    selector = "" if status.best_unary is None else f", unary {status.best_unary:.2f}, oracle {status.best_oracle:.2f}"
    best = "" if status.best_step is None else f" (best {status.best_acceptance:.2f} at step {status.best_step}{selector})"
    skipped = f"  skipped {status.num_skipped}" if status.num_skipped else ""
    lines = [
        f"{status.state}  up {format_time(status.uptime_s)}  {parts['left']}  {parts['restarts']}",
        f"{parts['step']}  {parts['loss']}  {parts['acceptance']}{best}{skipped}",
        f"tokens/s  targets {status.target_tokens_per_s:.0f}  drafters {status.drafter_tokens_per_s:.0f}",
    ]
    return Text("\n".join([*lines, parts["waiting"]] if status.verdict else lines))


def _describe_device(device: DeviceStatus) -> str:
    busy = "" if device.busy is None else f" {device.busy:.0%}"
    return f"{device.name}{busy}" + (f" {device.reserved_bytes / _GIB:.1f} GiB" if device.reserved_bytes else "")


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
            ", ".join(map(_describe_device, actor.devices)),
        )
    return table
