"""A cache driven at random beside the target without one: rows of different lengths keep, drop and leave.

Shapes: R rows, n tokens of a round, K taps, H hidden, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor

from launch.decoding.target_cache import TargetCache

NUM_ROUNDS, NUM_PENDING = 12, 4


@torch.inference_mode()
def largest_error(target: Any, tap_layers: list[int], prompts: list[list[int]]) -> float:
    """The largest difference of a logit or tap to a new prefill, over the largest logit or tap of its row."""
    random, texts = torch.Generator().manual_seed(3), [list(prompt) for prompt in prompts]
    with TargetCache(target, tap_layers) as cache:
        logits, prompt_taps = cache.prefill(texts)
        errors = [_error(target, text, tap_layers, logits[[row]], prompt_taps[row]) for row, text in enumerate(texts)]
        for number in range(NUM_ROUNDS):
            pending = torch.randint(0, 60, (len(texts), NUM_PENDING), generator=random).tolist()
            longer = [text + tokens for text, tokens in zip(texts, pending, strict=True)]
            logits, taps = cache.extend(pending)
            errors += [_error(target, text, tap_layers, logits[row], taps[row]) for row, text in enumerate(longer)]
            counts = torch.randint(1, NUM_PENDING + 1, (len(texts),), generator=random).tolist()
            rows = list(range(len(texts)))
            if number % 5 == 4 and len(rows) > 1:
                rows.pop(number % len(rows))  # leaves between extend and keep
                cache.select(rows)
            cache.keep([counts[row] for row in rows])
            texts = [texts[row] + pending[row][: counts[row]] for row in rows]
    assert len(texts) == max(1, len(prompts) - 2)
    return max(errors)


def _error(target: Any, text: list[int], tap_layers: list[int], logits: Tensor, taps: Tensor) -> float:
    """Against one pass over the text without a cache."""
    output = target(torch.tensor([text], device=target.device), use_cache=False, output_hidden_states=True)
    hidden = torch.stack([output.hidden_states[layer + 1][0] for layer in tap_layers], dim=1)
    pairs = (logits, output.logits[0, -len(logits) :]), (taps, hidden[-len(taps) :])
    return max(((found - needed).abs().max() / needed.abs().max()).item() for found, needed in pairs)
