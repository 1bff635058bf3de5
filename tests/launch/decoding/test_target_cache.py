"""The cache against the target without one, and what it does beside decoding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from common.errors import ModelError
from launch.decoding.target_cache import TargetCache
from tests.builders.cache_rounds import largest_error
from tests.builders.small_decodings import KINDS, PROMPTS, TARGETS
from tests.builders.targets import make_target


@pytest.mark.parametrize("num_rows", [1, 4])
@pytest.mark.parametrize(("model_type", "shape"), KINDS)
def test_every_round_equals_a_new_prefill(tmp_path: Path, model_type: str, shape: dict[str, Any], num_rows: int) -> None:
    config, target = make_target(tmp_path, model_type, **shape)
    assert largest_error(target, config.draft.tap_layers, PROMPTS[:num_rows]) < 1e-4


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
