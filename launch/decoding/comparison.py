"""Decode every case plainly and with drafts."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from launch.data.chat import TEMPLATE_ERRORS
from launch.decoding.answer import Decoding, Limits, max_length
from launch.decoding.cases import Case
from launch.decoding.difference import Difference, find_difference
from launch.decoding.pair import Pair
from launch.decoding.sampling import GREEDY
from launch.decoding.speculate import decode, speculate

_WARM_UP_TOKENS = 32


class Turn(NamedTuple):
    """One answer decoded both ways; `difference` only of greedy answers that are not equal."""

    case: Case
    number: int  # of the turn in its conversation
    prompt: list[int]
    plain: Decoding
    speculative: Decoding
    difference: Difference | None


class Comparison:
    """Decodes cases both ways, on the same prompts: earlier answers in a conversation are the plain ones.

    Random numbers come from the seed, the number of the case and that of the turn.

    Attributes:
        left_out: why turns were not decoded, and how many.
    """

    def __init__(self, pair: Pair, limits: Limits, seed: int) -> None:
        self.left_out: Counter[str] = Counter()
        self._pair, self._limits, self._seed = pair, limits, seed
        self._max_length = max_length(pair.target)

    def warm_up(self) -> None:
        """Decode any text, so that kernels are compiled and chosen before anything is timed."""
        config = self._pair.config
        prompt = [config.mask_token_id] * min(_WARM_UP_TOKENS, self._max_length)
        limits = Limits(2 * config.block_size)
        decode(self._pair.target, prompt, limits)
        speculate(*self._pair, prompt, limits)

    def run(self, cases: Sequence[Case]) -> Iterator[Turn]:
        """Decode every turn of every case, category by category."""
        for index, case in sorted(enumerate(cases), key=lambda item: item[1].category):
            prompt, number = self._next(case, None), 0
            while prompt is not None:
                turn = self._decode(case, prompt, number, [self._seed, index, number])
                yield turn
                prompt, number = self._next(case, turn.plain.tokens), number + 1

    def _decode(self, case: Case, prompt: list[int], number: int, seed: list[int]) -> Turn:
        target = self._pair.target
        plain = decode(target, prompt, self._limits, seed)
        fast = speculate(*self._pair, prompt, self._limits, seed)
        is_greedy = self._limits.sampling.temperature == GREEDY.temperature
        difference = find_difference(target, prompt, plain.tokens, fast.tokens) if is_greedy else None
        return Turn(case, number, prompt, plain, fast, difference)

    def _next(self, case: Case, answer: list[int] | None) -> list[int] | None:
        """Return the next prompt of a conversation; None at its end, and where it cannot go on."""
        try:
            prompt = next(case.turns) if answer is None else case.turns.send(answer)
        except StopIteration:
            return None
        except TEMPLATE_ERRORS as error:
            self.left_out[f"the chat template refuses: {error}"] += 1
            return None
        if 1 <= len(prompt) <= self._max_length:
            return prompt
        self.left_out[f"needed a prompt of 1 to {self._max_length} tokens, the positions of the target"] += 1
        return None
