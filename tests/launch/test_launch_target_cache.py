"""The cache against the target without one: rows of different lengths that keep, drop and leave at random.

Shapes: R rows, n tokens of a round, K taps, H hidden, V vocabulary.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import make_target
from torch import Tensor

from common.errors import ModelError
from launch.decoding.target_cache import TargetCache
from tests.launch.small_decodings import KINDS, PROMPTS, TARGETS

NUM_ROUNDS, NUM_PENDING = 12, 4


def plain_forward(target: Any, text: list[int], num_tokens: int, taps: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and taps of the last tokens of a text, by one pass without a cache."""
    output = target(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    hidden = torch.stack([output.hidden_states[layer + 1][0] for layer in taps], dim=1)
    return output.logits[0, -num_tokens:], hidden[-num_tokens:]


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize(("model_type", "shape"), KINDS)
def test_every_round_equals_a_new_prefill(tmp_path: Path, model_type: str, shape: dict[str, Any], num_rows: int) -> None:
    config, target = make_target(tmp_path, model_type, **shape)
    taps, random = config.draft.tap_layers, torch.Generator().manual_seed(3)
    texts = [list(prompt) for prompt in PROMPTS[:num_rows]]
    with TargetCache(target, taps) as cache:
        logits, prompt_taps = cache.prefill(texts)
        for row, text in enumerate(texts):
            expected = plain_forward(target, text, len(text), taps)
            torch.testing.assert_close(logits[row], expected[0][-1], atol=2e-3, rtol=1e-3)
            torch.testing.assert_close(prompt_taps[row], expected[1], atol=2e-3, rtol=1e-3)
        for number in range(NUM_ROUNDS):
            pending = torch.randint(0, 60, (len(texts), NUM_PENDING), generator=random).tolist()
            logits, new_taps = cache.extend(pending)
            for row, text in enumerate(texts):
                expected = plain_forward(target, text + pending[row], NUM_PENDING, taps)
                torch.testing.assert_close(logits[row], expected[0], atol=2e-3, rtol=1e-3)
                torch.testing.assert_close(new_taps[row], expected[1], atol=2e-3, rtol=1e-3)
            counts = torch.randint(1, NUM_PENDING + 1, (len(texts),), generator=random).tolist()
            rows = list(range(len(texts)))
            if number % 5 == 4 and len(rows) > 1:
                rows.pop(number % len(rows))  # leaves between extend and keep
                cache.select(rows)
            cache.keep([counts[row] for row in rows])
            texts = [texts[row] + pending[row][: counts[row]] for row in rows]
    assert len(texts) == max(1, num_rows - 2)


@torch.inference_mode()
def test_passes_are_counted_for_the_rows_that_took_part(tmp_path: Path) -> None:
    for name, expected in (("qwen3", [2, 2, 2]), ("qwen3_next", [3, 2, 3])):
        model_type, shape = TARGETS[name]
        _, target = make_target(tmp_path / name, model_type, **shape)
        with TargetCache(target) as cache:
            cache.prefill(PROMPTS[:3])
            cache.extend([[1, 2, 3]] * 3)
            cache.keep([1, 3, 2])  # a recurrent state is made again where drafts were refused
            assert cache.num_passes == expected


@torch.inference_mode()
def test_columns_that_no_row_uses_are_given_back(tmp_path: Path) -> None:
    model_type, shape = TARGETS["sliding"]
    _, target = make_target(tmp_path, model_type, **shape)
    with TargetCache(target) as cache:
        cache.prefill([[1] * 30, [2, 3]])
        for _ in range(5):
            cache.extend([[4, 5, 6], [7, 8, 9]])
            cache.keep([1, 3])
        assert cache._num_columns == 35
        cache.select([1])
        cache.extend([[1, 2, 3]])
        cache.keep([2])
        assert cache._num_columns == 2 + 5 * 3 + 2


def test_hooks_leave_with_the_cache(tmp_path: Path) -> None:
    _, target = make_target(tmp_path, "llama")
    with pytest.raises(RuntimeError, match="on purpose"), TargetCache(target, [0, 2]):
        raise RuntimeError("on purpose")
    assert not any(layer._forward_hooks for layer in target.model.layers)


def test_unknown_caches_hold_one_prompt_at_a_time(tmp_path: Path) -> None:
    _, target = make_target(tmp_path, "llama")
    cache = TargetCache(target)

    class OtherLayer(type(cache._cache.layers[0])):  # type: ignore[misc]
        """Not one that is known to hold nothing but keys and values."""

    cache._cache.layers[1] = OtherLayer()
    with pytest.raises(ModelError, match="or one prompt at a time, found OtherLayer"):
        cache.prefill([[1], [2, 3]])
    with torch.inference_mode():
        assert cache.prefill([[2, 3]])[0].shape == (1, 64)
