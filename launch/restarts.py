"""The deaths of the actors: how often each may die, when it is started again, and what it cost."""

import collections
import time

from common.config import SupervisionConfig


class Restarts:
    """Counts ends per actor; an actor that ends too often is not started again."""

    def __init__(self, settings: SupervisionConfig) -> None:
        self._settings = settings
        self._recent: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        self.counts: collections.Counter[str] = collections.Counter()
        self._down_since: dict[str, float] = {}
        self._lost_s: dict[str, float] = collections.defaultdict(float)

    def plan(self, name: str) -> float | None:
        """When to start the actor again after the end it came to now, or None where that was one too many."""
        now = time.monotonic()
        recent = self._recent[name]
        recent.append(now)
        while recent[0] < now - self._settings.window_s:
            recent.popleft()
        if len(recent) > self._settings.max_restarts:
            return None
        self.counts[name] += 1
        return now + self._settings.backoff_s * (2.0 ** (len(recent) - 1) - 1.0)

    def renew(self, name: str) -> float:
        """When to start it again after an end that an operator wanted: now, whatever came before."""
        self.counts[name] += 1
        return time.monotonic()

    def is_down(self, name: str, since_s: float) -> None:
        """Say since when (CLOCK_MONOTONIC) an actor does no work."""
        self._down_since.setdefault(name, since_s)

    def is_back(self, name: str) -> None:
        """Say that it works; harmless where it was not down."""
        self._lost_s[name] = self.lost_s(name)
        self._down_since.pop(name, None)

    def lost_s(self, name: str) -> float:
        """Seconds without its work after its deaths so far: from its last progress until it was ready again."""
        down_since = self._down_since.get(name)
        return self._lost_s[name] + (0.0 if down_since is None else time.monotonic() - down_since)
