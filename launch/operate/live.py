"""The live line of a run, and all else that `launch.start_all` prints while actors run."""

import os
import shutil
import sys
import time
from typing import TextIO

from common.ring.slot_table import SlotState, SlotTable
from launch.operate.pace import Pace, format_time

_FIRST_TO_GO = ("ring", "waiting", "restarts", "tok/s", "acceptance", "loss")  # where the terminal is narrow
_INTERVAL_S = 1.0
_INTERVAL_PIPED_S = 10.0


def show(text: str, end: str = "\n", stream: TextIO | None = None) -> None:
    """Print to the standard output, or to `stream`; where its terminal or reader is gone, this and all later text is dropped.

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
    """Step, loss, acceptance, tokens/s of each side, ring fill, what bounds the run, restarts, time left."""

    def __init__(self, pace: Pace, table: SlotTable) -> None:
        self._pace = pace
        self._table = table
        self._in_place = sys.stdout.isatty()
        self._last_s = time.monotonic()

    def show(self, num_restarts: int) -> None:
        """Print the line where it is time for one."""
        now = time.monotonic()
        if now - self._last_s < (_INTERVAL_S if self._in_place else _INTERVAL_PIPED_S):
            return
        self._last_s = now
        parts = self._compose(num_restarts)
        if self._in_place:
            show(f"\r{fit(parts, shutil.get_terminal_size().columns - 1)}\033[K", end="")
        else:
            show("  ".join(parts.values()))

    def end(self) -> None:
        """Leave the line as it stands."""
        if self._in_place:
            show("")

    def _compose(self, num_restarts: int) -> dict[str, str]:
        pace, lead = self._pace, self._pace.lead
        filled = len(self._table) - self._table.counts()[SlotState.FREE]
        waiting, acceptance = pace.waiting(), f"{lead.acceptance:.2f}" if lead.acceptance else "-"
        return {
            "step": f"step {lead.step}/{lead.num_steps or '?'}",
            "loss": f"loss {lead.loss:.4f}",
            "acceptance": f"acceptance {acceptance}",
            "tok/s": f"tok/s {pace.tokens_per_s('target'):.0f} > {pace.tokens_per_s('drafter'):.0f}",
            "ring": f"ring {filled}/{len(self._table)}",
            "waiting": str(waiting or "-"),
            "restarts": f"restarts {num_restarts}",
            "left": f"left {format_time(pace.time_left_s())}",
        }


def fit(parts: dict[str, str], width: int) -> str:
    """Return the parts as one line of at most `width` characters: the verdict without its shares, then fewer parts."""
    short = parts | {"waiting": parts["waiting"].partition(" (")[0]}
    fewer = [
        {name: short[name] for name in short if name not in _FIRST_TO_GO[:count]} for count in range(len(_FIRST_TO_GO) + 1)
    ]
    lines = ["  ".join(chosen.values()) for chosen in (parts, *fewer)]
    return next((line for line in lines if len(line) <= width), lines[-1][:width])
