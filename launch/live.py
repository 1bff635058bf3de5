"""The live line of a run, read from the board and the slot table; nobody is asked."""

import sys
import time

from common.board import Board, Notice
from common.slot_table import SlotState, SlotTable
from launch.topology import ActorSpec, Topology

_INTERVAL_S = 1.0
_INTERVAL_PIPED_S = 10.0


class LiveLine:
    """Step, loss, acceptance, tokens/s of each side, ring fill, restarts, time left."""

    def __init__(self, topology: Topology, board: Board, table: SlotTable) -> None:
        self._topology = topology
        self._board = board
        self._table = table
        self._in_place = sys.stdout.isatty()
        self._last_s = time.monotonic()
        self._last_tokens: dict[str, int] = {}
        self._first_step: tuple[float, int] | None = None

    def show(self, num_restarts: int) -> None:
        """Print the line where it is time for one."""
        now = time.monotonic()
        elapsed_s = now - self._last_s
        if elapsed_s < (_INTERVAL_S if self._in_place else _INTERVAL_PIPED_S):
            return
        notices = {spec.name: self._board.read(spec.place) for spec in self._topology.actors}
        line = self._compose(notices, elapsed_s, num_restarts)
        self._last_s = now
        print(f"\r{line}\033[K" if self._in_place else line, end="" if self._in_place else "\n", flush=True)

    def end(self) -> None:
        """Leave the line as it stands."""
        if self._in_place:
            print()

    def _compose(self, notices: dict[str, Notice], elapsed_s: float, num_restarts: int) -> str:
        lead = notices["drafter-0"]
        rates = {role: self._tokens_per_s(role, notices, elapsed_s) for role in ("target", "drafter")}
        counts = self._table.counts()
        filled = len(self._table) - counts[SlotState.FREE]
        acceptance = f"{lead.acceptance:.2f}" if lead.acceptance else "-"
        return (
            f"step {lead.step}/{lead.num_steps or '?'}  loss {lead.loss:.4f}  acceptance {acceptance}  "
            f"tok/s {rates['target']:.0f} > {rates['drafter']:.0f}  ring {filled}/{len(self._table)}  "
            f"restarts {num_restarts}  left {self._time_left(lead)}"
        )

    def _tokens_per_s(self, role: str, notices: dict[str, Notice], elapsed_s: float) -> float:
        return (
            sum(self._new_tokens(spec, notices[spec.name]) for spec in self._topology.actors if spec.role == role) / elapsed_s
        )

    def _new_tokens(self, spec: ActorSpec, notice: Notice) -> int:
        """Since the last line; a restarted actor counts from 0 again."""
        before = self._last_tokens.get(spec.name, 0)
        self._last_tokens[spec.name] = notice.num_tokens
        return notice.num_tokens - before if notice.num_tokens >= before else notice.num_tokens

    def _time_left(self, lead: Notice) -> str:
        now = time.monotonic()
        if lead.step < 1 or not lead.num_steps:
            return "?"
        if self._first_step is None or lead.step < self._first_step[1]:
            self._first_step = (now, lead.step)
        began_s, first = self._first_step
        if lead.step <= first:
            return "?"
        left_s = (lead.num_steps - lead.step) * (now - began_s) / (lead.step - first)
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
