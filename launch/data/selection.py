"""Which samples are written, how often and where: duplicates, weights, and the rows held out."""

import hashlib
from collections import deque
from collections.abc import Iterator

from common.data.arrow_file import Sample
from launch.data.inputs import Input
from launch.data.rules import Changed, Dropped, Outcome

_DIGEST_BYTES = 8


class Duplicates:
    """Samples that were there before, in any of the data sets; 64 bits are kept of each."""

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def remove(self, outcome: Outcome) -> Outcome:
        """The outcome without them."""
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
    """One data set on its way: rows go in, samples for training come out; its last rows stay for the held-out set.

    What is held out is a row as a whole, so that no conversation stands on both sides, and once, whatever the weight.
    """

    def __init__(self, source: Input, num_held_out: int) -> None:
        self.num_rows = 0
        self._weight = source.weight
        self._num_held_out = num_held_out
        self._last: deque[tuple[list[Sample], int]] = deque()
        self._num_last = 0

    def weigh(self, outcome: Outcome) -> tuple[Outcome, int]:
        """The outcome, and how often it is used: by the place of the row among those that are usable."""
        if not outcome.samples:
            return outcome, 0
        before, after = int(self.num_rows * self._weight), int((self.num_rows + 1) * self._weight)
        self.num_rows += 1
        return (outcome, after - before) if after > before else (Outcome([], Dropped.WEIGHT), 0)

    def push(self, samples: list[Sample], copies: int) -> Iterator[Sample]:
        """Put in a row; what is too early to be held out comes out."""
        self._last.append((samples, copies))
        self._num_last += len(samples)
        while self._last and self._num_last - len(self._last[0][0]) >= self._num_held_out:
            samples, copies = self._last.popleft()
            self._num_last -= len(samples)
            yield from samples * copies

    def held_out(self) -> list[Sample]:
        """The rows that are left at the end: at least as many samples as asked for, where there are so many."""
        return [sample for samples, _ in self._last for sample in samples]


def share_out(num_held_out: int, num_inputs: int) -> list[int]:
    """Equal shares of the held-out rows, the first ones larger by one where they do not come out even."""
    return [num_held_out // num_inputs + (place < num_held_out % num_inputs) for place in range(num_inputs)]
