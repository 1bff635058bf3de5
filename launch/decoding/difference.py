"""Find where two greedy answers to one prompt part, and whether rounding explains it.

Logits change a little with the shape of the pass that computes them. The last tokens before the first that differs run
again in several shapes. The change of the gap between two likely logits from shape to shape is rounding, and so is the
distance to the next number of their type; a smaller gap could have been decided by rounding. A cache that is wrong would
change them too, so `check_cache` comes first. n tokens of a pass, V vocabulary.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from common.errors import ModelError
from launch.decoding.answer import max_length
from launch.decoding.target_cache import TargetCache

_NUM_LIKELY = 10  # logits of a position whose gaps count
_NUM_POSITIONS = 64  # at the end of the text
_FEW, _NUM_REFUSED = 8, 3  # tokens of a pass, and more that are taken back behind them
_CHECKED_LENGTH = 24
_LARGEST_ERROR = 1 / 8  # of the logits; rounding in bfloat16 stays far smaller, a state that is not taken back does not


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first token that differs. Without a gap one answer ended where the other went on, which no rounding explains."""

    index: int  # in the answer
    plain_token: int | None
    speculative_token: int | None
    gap: float | None = None  # between the logits of the two tokens, run one by one
    rounding: float | None = None  # the largest change of a gap with the shape of the pass, or one step of the type

    @property
    def is_tie(self) -> bool:
        """Return True if rounding can have decided."""
        return self.gap is not None and self.rounding is not None and self.gap <= self.rounding


@torch.inference_mode()
def find_difference(
    target: PreTrainedModel, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Difference | None:
    """Compare two answers to a prompt; None where they are equal."""
    if plain == speculative:
        return None
    pairs = enumerate(zip(plain, speculative, strict=False))
    index = next((index for index, (left, right) in pairs if left != right), min(len(plain), len(speculative)))
    tokens = [answer[index] if index < len(answer) else None for answer in (plain, speculative)]
    if None in tokens:
        return Difference(index=index, plain_token=tokens[0], speculative_token=tokens[1])
    one_by_one, *others = logits_of_passes(target, [*prompt, *plain[:index]])
    likely = one_by_one.topk(min(_NUM_LIKELY, one_by_one.shape[1])).indices
    changes = torch.stack([(logits - one_by_one).gather(1, likely) for logits in others])
    left, right = one_by_one[-1, tokens].tolist()
    return Difference(
        index=index,
        plain_token=tokens[0],
        speculative_token=tokens[1],
        gap=abs(left - right),
        rounding=max((changes.amax(-1) - changes.amin(-1)).max().item(), _step(max(abs(left), abs(right)), target.dtype)),
    )


def _step(value: float, dtype: torch.dtype) -> float:
    """Return the distance from a positive number to the next in this type."""
    return math.ldexp(torch.finfo(dtype).eps, math.frexp(value)[1] - 1)


def logits_of_passes(target: PreTrainedModel, text: Sequence[int]) -> list[Tensor]:
    """Return logits [n, V] in float32 after each of the last n tokens: run one by one, a few at a time, and all at once."""
    first = max(len(text) - _NUM_POSITIONS, 0)
    return [
        *(_in_passes(target, text, first, size, extra) for size, extra in ((1, 0), (_FEW, _NUM_REFUSED))),
        _at_once(target, text, first),
    ]


def _in_passes(target: PreTrainedModel, text: Sequence[int], first: int, size: int, num_refused: int) -> Tensor:
    """Run `size` tokens at a time with a cache, which must forget the refused tokens behind them."""
    with TargetCache(target) as cache:
        rows = [cache.prefill(text[: first + 1])[0][None]]
        for start in range(first + 1, len(text), size):
            tokens = text[start : start + size]
            refused = text[: min(num_refused, max_length(target) - start - len(tokens))]
            rows.append(cache.extend([*tokens, *refused])[0][: len(tokens)])
            cache.keep(len(tokens))
    return torch.cat(rows).float()


def _at_once(target: PreTrainedModel, text: Sequence[int], first: int) -> Tensor:
    """Run the whole text in one pass without a cache."""
    ids, model = torch.tensor([list(text)], device=target.device), cast(Any, target)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=len(text) - first).logits
    return logits[0].float()


@torch.inference_mode()
def check_cache(target: PreTrainedModel) -> float:
    """Return the largest relative difference between the logits of a random text in passes of several shapes.

    Raises:
        ModelError: it is no rounding, or the target takes no cache.
    """
    length, vocab_size = min(_CHECKED_LENGTH, max_length(target)), target.config.get_text_config(decoder=True).vocab_size
    text = np.random.default_rng(0).integers(vocab_size, size=length).tolist()
    model_type = target.config.model_type
    try:
        *with_cache, at_once = (logits - logits.mean(-1, keepdim=True) for logits in logits_of_passes(target, text))
    except (TypeError, ValueError) as cause:
        raise ModelError(f"{model_type}: cannot be decoded with a cache: {cause}") from cause
    error = max(float((logits - at_once).norm() / at_once.norm()) for logits in with_cache)
    if not error <= _LARGEST_ERROR:
        raise ModelError(
            f"{model_type}: needed equal logits with and without its cache, found a relative difference of {error:.2g}; "
            "a target whose cache is wrong cannot be decoded"
        )
    return error
