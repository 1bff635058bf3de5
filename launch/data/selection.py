"""Select the samples to write: duplicates out, copies by weight, the last rows held out."""

import hashlib
from collections import deque
from collections.abc import Iterator

from common.data.arrow_file import Sample
from launch.data.inputs import Input
from launch.data.rules import Changed, Dropped, Outcome

_DIGEST_BYTES = 8


class Duplicates:
    """Samples of all data sets so far; 64 bits are kept of each."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def remove(self, outcome: Outcome) -> Outcome:
        """Return the outcome without samples that were there before."""
        new = [sample for sample in outcome.samples if self._is_new(sample)]
        if len(new) == len(outcome.samples):
            return outcome
        return Outcome(new, Changed.SOME_TURNS) if new else Outcome([], Dropped.DUPLICATE)

    def _is_new(self, sample: Sample) -> bool:
        digest = int.from_bytes(hashlib.blake2b(sample.input_ids.tobytes(), digest_size=_DIGEST_BYTES).digest())
        num_seen = len(self._seen)
        self._seen.add(digest)
        return len(self._seen) > num_seen


class Selection:
    """The rows of one data set: pushed in, they come out as samples for training; the last stay for the held-out set.

    A row is held out as a whole, so that no conversation is in both sets, and once, whatever the weight.
    """

    def __init__(self, source: Input, num_held_out: int) -> None:
        self.num_rows = 0
        self._weight = source.weight
        self._num_held_out = num_held_out
        self._last: deque[tuple[list[Sample], int]] = deque()
        self._num_last = 0

    def weigh(self, outcome: Outcome) -> tuple[Outcome, int]:
        """Return the outcome, and its number of copies: by the index of the row among those that are usable."""
        if not outcome.samples:
            return outcome, 0
        before, after = int(self.num_rows * self._weight), int((self.num_rows + 1) * self._weight)
        self.num_rows += 1
        return (outcome, after - before) if after > before else (Outcome([], Dropped.WEIGHT), 0)

    def push(self, samples: list[Sample], copies: int) -> Iterator[Sample]:
        """Put in a row; rows that are too early to be held out come out."""
        self._last.append((samples, copies))
        self._num_last += len(samples)
        while self._last and self._num_last - len(self._last[0][0]) >= self._num_held_out:
            samples, copies = self._last.popleft()
            self._num_last -= len(samples)
            yield from samples * copies

    def held_out(self) -> list[Sample]:
        """Return the last rows: at least as many samples as requested, where there are so many."""
        return [sample for samples, _ in self._last for sample in samples]


def share_out(num_held_out: int, num_inputs: int) -> list[int]:
    """Return equal shares of the held-out rows, the first ones larger by one where they do not come out even."""
    return [num_held_out // num_inputs + (index < num_held_out % num_inputs) for index in range(num_inputs)]
