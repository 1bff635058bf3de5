"""A cache driven at random beside the target without one: rounds keep some of their tokens.

Shapes: n tokens of a round, K taps, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from launch.decoding.target_cache import TargetCache

NUM_ROUNDS, NUM_PENDING = 12, 4


@torch.inference_mode()
def largest_error(target: Any, tap_layers: list[int], prompt: list[int]) -> float:
    """Return the largest difference of a logit or tap to a new prefill, over the largest logit or tap."""
    random, text = torch.Generator().manual_seed(3), list(prompt)
    with TargetCache(target, tap_layers) as cache:
        logits, taps = cache.prefill(text)
        errors = [_error(target, text, tap_layers, logits[None], taps)]
        for _ in range(NUM_ROUNDS):
            pending = torch.randint(0, 60, (NUM_PENDING,), generator=random).tolist()
            errors.append(_error(target, text + pending, tap_layers, *cache.extend(pending)))
            count = int(torch.randint(1, NUM_PENDING + 1, (), generator=random))
            cache.keep(count)
            text += pending[:count]
    return max(errors)


def _error(target: Any, text: list[int], tap_layers: list[int], logits: Tensor, taps: Tensor) -> float:
    """Against one pass over the text without a cache."""
    output = target(torch.tensor([text], device=target.device), use_cache=False, output_hidden_states=True)
    hidden = torch.stack([output.hidden_states[layer + 1][0] for layer in tap_layers], dim=1)
    pairs = (logits, output.logits[0, -len(logits) :]), (taps, hidden[-len(taps) :])
    return max(((found - needed).abs().max() / needed.abs().max()).item() for found, needed in pairs)
