"""Find where two greedy answers to one prompt part, and whether rounding explains it.

Logits change a little with the shape of the pass that computes them. The last tokens before the first that differs run
again in several shapes. The change of the gap between two likely logits from shape to shape is rounding, and so is the
distance to the next number of their type; a smaller gap could have been decided by rounding.
"""

import math
from collections.abc import Sequence

import msgspec
import torch
from transformers import PreTrainedModel

from launch.decoding.passes import logits_of_passes

_NUM_LIKELY = 10  # logits of a position whose gaps count


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
