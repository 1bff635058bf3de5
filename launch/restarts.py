"""How often an actor may die: its restarts within a window, and the pause before the next one."""

import collections
import time

from common.config import SupervisionConfig


class Restarts:
    """Counts ends per actor; an actor that ends too often is not started again."""

    def __init__(self, settings: SupervisionConfig) -> None:
        self._settings = settings
        self._recent: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        self.counts: collections.Counter[str] = collections.Counter()

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
