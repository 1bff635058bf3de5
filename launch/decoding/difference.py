"""Where two greedy answers to one prompt part, and whether rounding explains it.

The same logits come out a little different when a pass has another shape. At the first token that differs they are
computed in two plain ways, neither of which has anything to do with drafts: token by token with a cache, and all at
once without one. A tie is what the difference between the two could have decided.
"""

from collections.abc import Sequence

import msgspec
import torch
from transformers import PreTrainedModel

from launch.decoding.target_cache import TargetCache

_NUM_LIKELY = 10  # logits whose change is looked at


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The first token that differs. Without a gap one answer ended where the other went on, which no rounding explains."""

    place: int  # in the answer
    plain_token: int | None
    speculative_token: int | None
    gap: float | None = None  # between the logits of the two tokens, token by token
    rounding: float | None = None  # the largest change of a likely logit between the two ways

    @property
    def is_tie(self) -> bool:
        """The gap is within rounding."""
        return self.gap is not None and self.rounding is not None and self.gap <= self.rounding


@torch.inference_mode()
def find_difference(
    target: PreTrainedModel, prompt: Sequence[int], plain: Sequence[int], speculative: Sequence[int]
) -> Difference | None:
    """Compare the answers to a prompt; None where they are equal."""
    if plain == speculative:
        return None
    same = zip(plain, speculative, strict=False)
    place = next((index for index, (left, right) in enumerate(same) if left != right), None)
    if place is None:
        place = min(len(plain), len(speculative))
        tokens = [answer[place] if place < len(answer) else None for answer in (plain, speculative)]
        return Difference(place=place, plain_token=tokens[0], speculative_token=tokens[1])
    with TargetCache(target) as cache:
        by_token, _ = cache.prefill([prompt])
        for token in plain[:place]:
            by_token = cache.extend([[token]])[0][:, 0]
            cache.keep([1])
    with TargetCache(target) as cache:
        at_once, _ = cache.prefill([[*prompt, *plain[:place]]])
    likely = torch.cat([by_token, at_once]).amax(dim=0).topk(min(_NUM_LIKELY, by_token.shape[1])).indices
    first, second = by_token[0].float(), at_once[0].float()
    return Difference(
        place=place,
        plain_token=plain[place],
        speculative_token=speculative[place],
        gap=(first[plain[place]] - first[speculative[place]]).abs().item(),
        rounding=(first[likely] - second[likely]).abs().max().item(),
    )
