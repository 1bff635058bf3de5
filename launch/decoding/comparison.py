"""Every case decoded plainly and with drafts, a few of one category at a time."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from launch.data.chat import TEMPLATE_ERRORS
from launch.decoding.answer import Decoding, Limits, max_length
from launch.decoding.cases import Case
from launch.decoding.difference import Difference, find_difference
from launch.decoding.pair import Pair
from launch.decoding.sampling import GREEDY
from launch.decoding.speculate import Batch, decode, speculate

_WARM_UP_TOKENS = 32


class Turn(NamedTuple):
    """One answer, both ways; `difference` only of greedy answers that are not the same."""

    case: Case
    number: int  # of the turn in its conversation
    prompt: list[int]
    plain: Decoding
    speculative: Decoding
    difference: Difference | None


class Outcome(NamedTuple):
    """Turns that were decoded together."""

    turns: list[Turn]
    plain: Batch
    speculative: Batch

    @property
    def category(self) -> str:
        """The same of all turns."""
        return self.turns[0].case.category


class Comparison:
    """Decodes cases both ways, on the same prompts: earlier answers in a conversation are the plain ones.

    Random numbers come from the seed, the number of the case and that of the turn: who is decoded beside whom does not
    matter.

    Attributes:
        left_out: why turns were not decoded, and how many.
    """

    def __init__(self, pair: Pair, limits: Limits, seed: int, batch_size: int) -> None:
        self.left_out: Counter[str] = Counter()
        self._pair, self._limits = pair, limits
        self._seed, self._batch_size = seed, batch_size
        self._max_length = max_length(pair.target)

    def warm_up(self) -> None:
        """Decode something of no interest, so that kernels are compiled and chosen before anything is timed."""
        config = self._pair.config
        prompt = [config.mask_token_id] * min(_WARM_UP_TOKENS, self._max_length)
        prompts, limits = [prompt] * self._batch_size, Limits(2 * config.block_size)
        decode(self._pair.target, prompts, limits)
        speculate(*self._pair, prompts, limits)

    def run(self, cases: Sequence[Case]) -> Iterator[Outcome]:
        """Batch by batch, category by category. ModelError where the target cannot hold several prompts."""
        numbered = sorted(enumerate(cases), key=lambda item: item[1].category)
        for _, group in groupby(numbered, key=lambda item: item[1].category):
            members = list(group)
            for start in range(0, len(members), self._batch_size):
                yield from self._hold(members[start : start + self._batch_size])

    def _hold(self, members: list[tuple[int, Case]]) -> Iterator[Outcome]:
        """Conversations together, turn by turn, until the last has ended."""
        asked = [(number, case, self._next(case, None)) for number, case in members]
        turn = 0
        while open_turns := [(number, case, prompt) for number, case, prompt in asked if prompt is not None]:
            seeds = [[self._seed, number, turn] for number, _, _ in open_turns]
            outcome = self._decode([(case, prompt) for _, case, prompt in open_turns], seeds, turn)
            yield outcome
            answers = [one.plain.tokens for one in outcome.turns]
            asked = [
                (number, case, self._next(case, answer)) for (number, case, _), answer in zip(open_turns, answers, strict=True)
            ]
            turn += 1

    def _decode(self, asked: list[tuple[Case, list[int]]], seeds: list[list[int]], number: int) -> Outcome:
        prompts = [prompt for _, prompt in asked]
        plain = decode(self._pair.target, prompts, self._limits, seeds)
        fast = speculate(*self._pair, prompts, self._limits, seeds)
        turns = []
        for (case, prompt), left, right in zip(asked, plain.decodings, fast.decodings, strict=True):
            difference = self._difference(prompt, left, right, num_rows=len(asked))
            turns.append(Turn(case, number, prompt, left, right, difference))
        return Outcome(turns, plain, fast)

    def _difference(self, prompt: list[int], plain: Decoding, fast: Decoding, *, num_rows: int) -> Difference | None:
        if self._limits.sampling.temperature != GREEDY.temperature:
            return None
        return find_difference(self._pair.target, prompt, plain.tokens, fast.tokens, num_rows=num_rows)

    def _next(self, case: Case, answer: list[int] | None) -> list[int] | None:
        """The next prompt of a conversation; None at its end, and where it cannot go on."""
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
