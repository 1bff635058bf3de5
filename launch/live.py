"""The live line of a run."""

import sys
import time

from common.slot_table import SlotState, SlotTable
from launch.pace import Pace, format_time

_INTERVAL_S = 1.0
_INTERVAL_PIPED_S = 10.0


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
        line = self._compose(num_restarts)
        print(f"\r{line}\033[K" if self._in_place else line, end="" if self._in_place else "\n", flush=True)

    def end(self) -> None:
        """Leave the line as it stands."""
        if self._in_place:
            print()

    def _compose(self, num_restarts: int) -> str:
        pace, lead = self._pace, self._pace.lead
        filled = len(self._table) - self._table.counts()[SlotState.FREE]
        acceptance = f"{lead.acceptance:.2f}" if lead.acceptance else "-"
        return (
            f"step {lead.step}/{lead.num_steps or '?'}  loss {lead.loss:.4f}  acceptance {acceptance}  "
            f"tok/s {pace.tokens_per_s('target'):.0f} > {pace.tokens_per_s('drafter'):.0f}  "
            f"ring {filled}/{len(self._table)}  {pace.waiting() or '-'}  "
            f"restarts {num_restarts}  left {format_time(pace.time_left_s())}"
        )
