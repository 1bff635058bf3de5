"""The deaths of the actors: how often each may die, when it is started again, and what it cost."""

import collections
import time
from typing import NamedTuple

from common.config import SupervisionConfig


class Progress(NamedTuple):
    """Counts that only grow; where both are equal at two deaths of an actor, no work was done between them."""

    step: int  # the furthest optimizer step of the run
    num_batches: int  # that the actor, or all that it serves, have computed


class Restarts:
    """Counts deaths per actor; an actor that dies too often, or again and again without progress, is not started again."""

    def __init__(self, settings: SupervisionConfig) -> None:
        self._settings = settings
        self._recent: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        self._at_death: dict[str, Progress] = {}  # at the latest
        self._fruitless: collections.Counter[str] = collections.Counter()  # deaths in a row at that progress
        self.counts: collections.Counter[str] = collections.Counter()
        self._down_since: dict[str, float] = {}
        self._lost_s: dict[str, float] = collections.defaultdict(float)

    def plan(self, name: str, progress: Progress) -> float | str:
        """Return when to start an actor that has just died again, or why this death was one too many.

        Restarts within the window bound a fast loop, deaths without progress a slow one.
        """
        now, settings = time.monotonic(), self._settings
        self._fruitless[name] = self._fruitless[name] + 1 if self._at_death.get(name) == progress else 1
        self._at_death[name] = progress
        if self._fruitless[name] >= settings.max_deaths_without_progress:
            return f"{self._fruitless[name]} times without a new batch or step between"
        recent = self._recent[name]
        recent.append(now)
        while recent[0] < now - settings.window_s:
            recent.popleft()
        if len(recent) > settings.max_restarts:
            return f"{len(recent)} times within {settings.window_s:g} s"
        self.counts[name] += 1
        return now + settings.backoff_s * (2.0 ** (len(recent) - 1) - 1.0)

    def plan_replacement(self, name: str) -> float:
        """Return when to start an actor again that an operator ended: now, however often it died before."""
        self.counts[name] += 1
        return time.monotonic()

    def mark_down(self, name: str, since_s: float) -> None:
        """Note since when (CLOCK_MONOTONIC) an actor does no work."""
        self._down_since.setdefault(name, since_s)

    def mark_up(self, name: str) -> None:
        """Note that an actor works; harmless where it was not down."""
        self._lost_s[name] = self.lost_s(name)
        self._down_since.pop(name, None)

    def lost_s(self, name: str) -> float:
        """Return the seconds without an actor's work: from its last progress before each death until it was ready again."""
        down_since = self._down_since.get(name)
        return self._lost_s[name] + (0.0 if down_since is None else time.monotonic() - down_since)
