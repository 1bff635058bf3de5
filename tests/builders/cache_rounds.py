"""Drive a cache at random beside the target without one, in rounds that keep some of their tokens.

Shapes: n tokens of a round, K taps, H hidden, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from launch.decoding.target_cache import TargetCache

NUM_ROUNDS, NUM_PENDING = 12, 4


class _Widen(TorchFunctionMode):
    """Let code that asks for float32 get float64: models compute norms, rotations and recurrent states in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        return func(*map(_widen, args), **{name: _widen(value) for name, value in (kwargs or {}).items()})


def _widen(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


@contextmanager
def float64_everywhere() -> Iterator[None]:
    """Compute in float64, so that what differs by more than 1e-11 is a fault and no rounding."""
    torch.set_default_dtype(torch.float64)
    try:
        with _Widen():
            yield
    finally:
        torch.set_default_dtype(torch.float32)


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
