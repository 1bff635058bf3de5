"""Answers as they grow: what ends them, and what each has come to."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from common.errors import DataError
from launch.decoding.sampling import GREEDY, Sampling

Prompts = Sequence[Sequence[int]]


class Limits(NamedTuple):
    """How an answer is chosen and where it ends."""

    max_new_tokens: int
    stop_tokens: Collection[int] = ()
    sampling: Sampling = GREEDY


@dataclass(frozen=True)
class Decoding:
    """The answer to one prompt.

    Attributes:
        tokens: the new tokens, up to and with the first stop token.
        num_target_passes: passes of the target that this prompt took part in, the prefill included.
        accepted: drafts accepted and emitted, per verification round; empty without drafts.
    """

    tokens: list[int]
    num_target_passes: int
    accepted: list[int]


@dataclass
class Answer:
    """One answer as it grows."""

    num_positions: int  # of the target, behind the prompt
    max_tokens: int
    stop_tokens: Collection[int]
    random: np.random.Generator
    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    num_target_passes: int = 0

    @property
    def room(self) -> int:
        """Tokens that may still come."""
        return 0 if self.tokens and self.tokens[-1] in self.stop_tokens else self.max_tokens - len(self.tokens)

    @property
    def decoding(self) -> Decoding:
        """As it is now."""
        return Decoding(self.tokens, self.num_target_passes, self.accepted)

    def add(self, tokens: Sequence[int]) -> int:
        """Append as many as there is room for, up to the first stop token; returns how many."""
        before = len(self.tokens)
        for token in tokens[: self.room]:
            self.tokens.append(token)
            if token in self.stop_tokens:
                break
        return len(self.tokens) - before


def max_length(target: PreTrainedModel) -> int:
    """The number of positions that the target was made for."""
    length: int = target.config.get_text_config(decoder=True).max_position_embeddings
    return length


def begin_answers(target: PreTrainedModel, prompts: Prompts, limits: Limits, seeds: Sequence[Sequence[int]]) -> list[Answer]:
    """One empty answer per prompt. DataError where a prompt is empty or longer than the target, or no token is asked for."""
    longest = max_length(target)
    for number, prompt in enumerate(prompts):
        if not 1 <= len(prompt) <= longest:
            raise DataError(f"prompt {number}: needed 1 to {longest} tokens, found {len(prompt)}")
    if limits.max_new_tokens < 1:
        raise DataError(f"max_new_tokens: needed at least 1, found {limits.max_new_tokens}")
    return [
        Answer(
            num_positions=longest - len(prompt),
            max_tokens=min(limits.max_new_tokens, longest - len(prompt) + 1),  # the last one needs no position
            stop_tokens=limits.stop_tokens,
            random=np.random.Generator(np.random.Philox(np.random.SeedSequence(list(seed)))),
        )
        for prompt, seed in zip(prompts, seeds or [[number] for number in range(len(prompts))], strict=True)
    ]
