"""The answer to a prompt: its limits, its tokens while it grows, and its final form."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedModel

from common.errors import DataError
from launch.decoding.sampling import GREEDY, Sampling


class Limits(NamedTuple):
    """Say which tokens an answer may have."""

    max_new_tokens: int
    stop_tokens: Collection[int] = ()
    sampling: Sampling = GREEDY


@dataclass(frozen=True)
class Decoding:
    """The answer to one prompt. Times do not count when two are compared."""

    tokens: list[int]  # up to and with the first stop token
    num_target_passes: int  # the prefill included
    accepted: list[int]  # drafts accepted and emitted, per verification round; empty without drafts
    prefill_s: float = field(default=0.0, compare=False)  # until the first token
    decode_s: float = field(default=0.0, compare=False)  # from the first token to the last


class Answer:
    """One answer while it grows, with its random numbers."""

    def __init__(self, target: PreTrainedModel, prompt: Sequence[int], limits: Limits, seed: Sequence[int]) -> None:
        """Begin an empty answer; DataError where the prompt is empty or longer than the target, or no token is wanted."""
        longest = max_length(target)
        if not 1 <= len(prompt) <= longest:
            raise DataError(f"prompt: needed 1 to {longest} tokens, found {len(prompt)}")
        if limits.max_new_tokens < 1:
            raise DataError(f"max_new_tokens: needed at least 1, found {limits.max_new_tokens}")
        self.random = np.random.Generator(np.random.Philox(np.random.SeedSequence(list(seed))))
        self.tokens: list[int] = []
        self.accepted: list[int] = []
        self._stop_tokens = limits.stop_tokens
        self._max_tokens = min(limits.max_new_tokens, longest - len(prompt) + 1)  # the last token needs no position

    @property
    def room(self) -> int:
        """Return how many tokens may still come."""
        return 0 if self.tokens and self.tokens[-1] in self._stop_tokens else self._max_tokens - len(self.tokens)

    def add(self, tokens: Sequence[int]) -> int:
        """Append as many tokens as there is room for, up to the first stop token; return how many."""
        before = len(self.tokens)
        for token in tokens[: self.room]:
            self.tokens.append(token)
            if token in self._stop_tokens:
                break
        return len(self.tokens) - before


def max_length(target: PreTrainedModel) -> int:
    """Return the number of positions that the target was made for."""
    length: int = target.config.get_text_config(decoder=True).max_position_embeddings
    return length
