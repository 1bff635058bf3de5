"""The speed of a run and the side that bounds it, from the board alone; no actor has to answer.

The side that waits less bounds the run: targets wait for a free slot or for a batch that is still needed, drafters for
their next batch.
"""

import collections
import time
from typing import NamedTuple

from common.actor.board import Board, Notice, Phase
from launch.operate.topology import Topology

WINDOW_S = 30.0  # that rates and shares are taken over
_SAMPLE_S = 1.0
_BALANCED = 0.1  # shares of waiting time that differ by less

_Totals = dict[tuple[str, str], float]  # (role, figure) -> since the start of the run


class Waiting(NamedTuple):
    """Share of the window that the actors of a side spent waiting, on average over the side."""

    targets: float
    drafters: float

    def verdict(self) -> str:
        """Return `drafter bound`, `target bound` or `balanced`."""
        if abs(self.targets - self.drafters) < _BALANCED:
            return "balanced"
        return "drafter bound" if self.targets > self.drafters else "target bound"


class Pace:
    """Reads the board at every tick and keeps a sample a second."""

    def __init__(self, topology: Topology, board: Board) -> None:
        self._actors = topology.actors
        self._board = board
        self._seen: dict[tuple[str, str], float] = {}  # (actor, figure) -> as last read
        self._totals: _Totals = collections.defaultdict(float)
        self._samples: collections.deque[tuple[float, _Totals]] = collections.deque([(time.monotonic(), {})])
        self._first_step: tuple[float, int] | None = None

    @property
    def lead(self) -> Notice:
        """Record of the drafter that is furthest."""
        drafters = [self._board.read(spec.record) for spec in self._actors if spec.role == "drafter"]
        return max(drafters, key=lambda notice: notice.step)

    def observe(self) -> None:
        """Add the figures that the actors have written since the last call."""
        now = time.monotonic()
        if now - self._samples[-1][0] < _SAMPLE_S:
            return
        for spec in self._actors:
            notice = self._board.read(spec.record)
            for figure, value in (("num_tokens", float(notice.num_tokens)), ("waiting_s", notice.waiting_s)):
                seen = self._seen.get((spec.name, figure), 0.0)
                self._totals[spec.role, figure] += value - seen if value >= seen else value  # a new incarnation counts from 0
                self._seen[spec.name, figure] = value
        self._samples.append((now, dict(self._totals)))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()
        step = self.lead.step
        if step and (self._first_step is None or step < self._first_step[1]):
            self._first_step = now, step

    def tokens_per_s(self, role: str) -> float:
        """Return the tokens of all actors of a side together, per second of the window."""
        return self._growth_per_s(role, "num_tokens")

    def waiting(self) -> Waiting | None:
        """Return the shares of both sides; None before both are at work."""
        if not (self._is_at_work("target") and self._is_at_work("drafter")):
            return None
        return Waiting(self._share("target"), self._share("drafter"))

    def time_left_s(self) -> float | None:
        """Return the time to the last step at the mean speed since the first step seen; None before the second."""
        lead, now = self.lead, time.monotonic()
        if self._first_step is None or lead.step <= self._first_step[1] or not lead.num_steps:
            return None
        began_s, first = self._first_step
        return (lead.num_steps - lead.step) * (now - began_s) / (lead.step - first)

    def _growth_per_s(self, role: str, figure: str) -> float:
        (start_s, first), (end_s, last) = self._samples[0], self._samples[-1]
        grown = last.get((role, figure), 0.0) - first.get((role, figure), 0.0)
        return grown / (end_s - start_s) if end_s > start_s else 0.0

    def _is_at_work(self, role: str) -> bool:
        return any(self._board.read(spec.record).phase == Phase.READY for spec in self._actors if spec.role == role)

    def _share(self, role: str) -> float:
        return min(1.0, self._growth_per_s(role, "waiting_s") / sum(spec.role == role for spec in self._actors))
