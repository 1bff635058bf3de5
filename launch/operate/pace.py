"""How fast a run goes and what bounds it, from the board alone; nobody is asked.

The side that waits less is the one that bounds the run: targets wait for a free slot (or for a batch
that is still needed), drafters wait for their next batch.
"""

import collections
import time
from typing import NamedTuple

from common.actor.board import Board, Notice, Phase
from launch.operate.topology import Topology

WINDOW_S = 30.0  # that the shares look back
_SAMPLE_S = 1.0
_BALANCED = 0.1  # shares of waiting time that differ by less


class Waiting(NamedTuple):
    """Shares of the last half minute that the actors of a side spent waiting, on average over the side."""

    targets: float
    drafters: float

    def verdict(self) -> str:
        """`drafter bound`, `target bound` or `balanced`."""
        if abs(self.targets - self.drafters) < _BALANCED:
            return "balanced"
        return "drafter bound" if self.targets > self.drafters else "target bound"

    def __str__(self) -> str:
        return f"{self.verdict()} (targets wait {self.targets:.0%}, drafters {self.drafters:.0%})"


class _Sample(NamedTuple):
    time_s: float
    num_tokens: dict[str, float]  # role -> since the start of the run
    waited_s: dict[str, float]


class Pace:
    """Looks at the board at every tick and keeps a sample a second."""

    def __init__(self, topology: Topology, board: Board) -> None:
        self._actors = topology.actors
        self._board = board
        self._before: dict[str, tuple[float, float]] = {}
        self._num_tokens: dict[str, float] = collections.defaultdict(float)  # role -> since the start
        self._waited_s: dict[str, float] = collections.defaultdict(float)
        self._samples = collections.deque([_Sample(time.monotonic(), {}, {})])
        self._first_step: tuple[float, int] | None = None

    @property
    def lead(self) -> Notice:
        """What the drafter that is furthest shows at this moment."""
        drafters = [self._board.read(spec.place) for spec in self._actors if spec.role == "drafter"]
        return max(drafters, key=lambda notice: notice.step)

    def observe(self) -> None:
        """Take what the actors have written since the last call."""
        now = time.monotonic()
        if now - self._samples[-1].time_s < _SAMPLE_S:
            return
        for spec in self._actors:
            self._add(spec.name, spec.role, self._board.read(spec.place))
        self._samples.append(_Sample(now, dict(self._num_tokens), dict(self._waited_s)))
        while len(self._samples) > 2 and self._samples[1].time_s <= now - WINDOW_S:
            self._samples.popleft()
        step = self.lead.step
        if step and (self._first_step is None or step < self._first_step[1]):
            self._first_step = now, step

    def tokens_per_s(self, role: str) -> float:
        """Of all actors of a side together, over the window."""
        first, last = self._samples[0], self._samples[-1]
        new = last.num_tokens.get(role, 0.0) - first.num_tokens.get(role, 0.0)
        return new / (last.time_s - first.time_s) if last.time_s > first.time_s else 0.0

    def waiting(self) -> Waiting | None:
        """None before both sides are at work."""
        if not (self._is_at_work("target") and self._is_at_work("drafter")):
            return None
        return Waiting(self._share("target"), self._share("drafter"))

    def time_left_s(self) -> float | None:
        """At the mean speed since the first step seen; None before the second."""
        lead, now = self.lead, time.monotonic()
        if self._first_step is None or lead.step <= self._first_step[1] or not lead.num_steps:
            return None
        began_s, first = self._first_step
        return (lead.num_steps - lead.step) * (now - began_s) / (lead.step - first)

    def _add(self, name: str, role: str, notice: Notice) -> None:
        """An actor that was started again counts from 0."""
        figures = float(notice.num_tokens), notice.waiting_s
        before = self._before.get(name, (0.0, 0.0))
        for total, value, seen in zip((self._num_tokens, self._waited_s), figures, before, strict=True):
            total[role] += value - seen if value >= seen else value
        self._before[name] = figures

    def _is_at_work(self, role: str) -> bool:
        return any(self._board.read(spec.place).phase == Phase.READY for spec in self._actors if spec.role == role)

    def _share(self, role: str) -> float:
        first, last = self._samples[0], self._samples[-1]
        waited_s = last.waited_s.get(role, 0.0) - first.waited_s.get(role, 0.0)
        actors_s = (last.time_s - first.time_s) * sum(spec.role == role for spec in self._actors)
        return min(1.0, waited_s / actors_s) if actors_s else 0.0


def format_time(seconds: float | None) -> str:
    """As on a clock: 1:20, 4:35:50; ? where it is not known."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
