"""Where two greedy answers to one prompt part, and whether rounding explains it.

The same logits come out a little different when a pass has another shape. The last tokens up to the first that differs
run again in several plain ways, none of which has anything to do with drafts: one by one, a few at a time, all at once.
The change of the gap between two likely logits from way to way is rounding, and so is the last place of the logits
themselves; a gap that is no larger could have been decided by it.
"""

import math
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import torch
from torch import Tensor
from transformers import PreTrainedModel

from launch.decoding.target_cache import TargetCache

_NUM_LIKELY = 10  # logits of a position whose gaps are looked at
_NUM_POSITIONS = 64
_FEW = 8  # tokens in a pass


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first token that differs. Without a gap one answer ended where the other went on, which no rounding explains."""

    place: int  # in the answer
    plain_token: int | None
    speculative_token: int | None
    gap: float | None = None  # between the logits of the two tokens, run one by one
    rounding: float | None = None  # the largest change of a gap from one way to another, and a last place at least

    @property
    def is_tie(self) -> bool:
        """The gap is within rounding."""
        return self.gap is not None and self.rounding is not None and self.gap <= self.rounding


@torch.inference_mode()
def find_difference(
    target: PreTrainedModel, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Difference | None:
    """Compare two answers to a prompt; None where they are equal."""
    if plain == speculative:
        return None
    same = zip(plain, speculative, strict=False)
    place = next((index for index, (left, right) in enumerate(same) if left != right), None)
    if place is None:
        place = min(len(plain), len(speculative))
        tokens = [answer[place] if place < len(answer) else None for answer in (plain, speculative)]
        return Difference(place=place, plain_token=tokens[0], speculative_token=tokens[1])
    text = [*prompt, *plain[:place]]
    one_by_one, *others = _ways(target, text)
    likely = one_by_one.topk(min(_NUM_LIKELY, one_by_one.shape[1])).indices
    changes = torch.stack([(way - one_by_one).gather(1, likely) for way in others])
    left, right = one_by_one[-1, plain[place]].item(), one_by_one[-1, speculative[place]].item()
    return Difference(
        place=place,
        plain_token=plain[place],
        speculative_token=speculative[place],
        gap=abs(left - right),
        rounding=max((changes.amax(-1) - changes.amin(-1)).max().item(), _last_place(max(abs(left), abs(right)), target.dtype)),
    )


def _last_place(value: float, dtype: torch.dtype) -> float:
    """From a positive number to the next in this type."""
    return math.ldexp(torch.finfo(dtype).eps, math.frexp(value)[1] - 1)


def _ways(target: PreTrainedModel, text: Sequence[int]) -> list[Tensor]:
    """Logits [n, V] in float32 of what follows the last n tokens, one by one and in the other ways."""
    return [*(_logits_in_passes(target, text, size) for size in (1, _FEW)), _logits_at_once(target, text)]


def _logits_in_passes(target: PreTrainedModel, text: Sequence[int], size: int) -> Tensor:
    """With a cache, `size` tokens at a time."""
    first = _first(text)
    with TargetCache(target) as cache:
        rows = [cache.prefill(text[: first + 1])[0][None]]
        for start in range(first + 1, len(text), size):
            tokens = text[start : start + size]
            rows.append(cache.extend(tokens)[0])
            cache.keep(len(tokens))
    return torch.cat(rows).float()


def _logits_at_once(target: PreTrainedModel, text: Sequence[int]) -> Tensor:
    """By one pass over the whole text."""
    ids, model = torch.tensor([list(text)], device=target.device), cast(Any, target)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=len(text) - _first(text)).logits
    return logits[0].float()


def _first(text: Sequence[int]) -> int:
    """The first of the last tokens."""
    return max(len(text) - _NUM_POSITIONS, 0)
