"""The cache against the target without one, and what it does beside decoding."""

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.decoding.target_cache import TargetCache
from tests.builders.cache_rounds import largest_error
from tests.builders.small_decodings import KINDS, PROMPTS, TARGETS
from tests.builders.targets import make_target


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[2]], ids=len)
@pytest.mark.parametrize(("model_type", "shape"), KINDS)
def test_every_round_equals_a_new_prefill(tmp_path: Path, model_type: str, shape: dict[str, Any], prompt: list[int]) -> None:
    config, target = make_target(tmp_path, model_type, **shape)
    assert largest_error(target, config.draft.tap_layers, prompt) < 1e-3


@torch.inference_mode()
def test_passes_are_counted(tmp_path: Path) -> None:
    for name, expected in (("qwen3", [2, 2]), ("qwen3_next", [3, 2])):
        model_type, shape = TARGETS[name]
        _, target = make_target(tmp_path / name, model_type, **shape)
        for count, num_passes in zip((1, 3), expected, strict=True):
            with TargetCache(target) as cache:
                cache.prefill(PROMPTS[0])
                cache.extend([1, 2, 3])
                cache.keep(count)  # a recurrent state is made again where drafts were refused
                assert cache.num_passes == num_passes


def test_hooks_leave_with_the_cache(tmp_path: Path) -> None:
    _, target = make_target(tmp_path, "llama")
    with pytest.raises(RuntimeError, match="on purpose"), TargetCache(target, [0, 2]):
        raise RuntimeError("on purpose")
    assert not any(layer._forward_hooks for layer in target.model.layers)
