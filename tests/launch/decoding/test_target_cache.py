"""The cache of a target beside the target without one: refused tokens leave nothing behind, and unknown caches are refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import cache_utils
from transformers.cache_utils import DynamicLayer

from common.errors import ModelError
from launch.decoding.difference import check_cache
from launch.decoding.target_cache import TargetCache
from tests.builders.cache_rounds import float64_everywhere, largest_error
from tests.builders.small_decodings import KINDS, PROMPTS, TARGETS
from tests.builders.targets import make_target


@pytest.mark.parametrize("prompt", [PROMPTS[0], PROMPTS[2]], ids=len)
@pytest.mark.parametrize(("model_type", "shape"), KINDS)
def test_every_round_equals_a_new_prefill(tmp_path: Path, model_type: str, shape: dict[str, Any], prompt: list[int]) -> None:
    """In float64: in float32 recurrent layers amplify rounding to 1e-4 of the largest logit, as large as a small fault."""
    config, target = make_target(tmp_path, model_type, **shape)
    with float64_everywhere():
        assert largest_error(target.double(), config.draft.tap_layers, prompt) < 1e-11


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


@pytest.mark.parametrize(("model_type", "shape"), KINDS)
def test_right_caches_pass_the_check(tmp_path: Path, model_type: str, shape: dict[str, Any]) -> None:
    _, target = make_target(tmp_path, model_type, **shape)
    assert check_cache(target) < 1e-4
    assert check_cache(target.bfloat16()) < 0.1


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "bamba", "falcon_h1"])
def test_a_recurrent_state_that_is_not_taken_back_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    model_type, shape = TARGETS[name]
    _, target = make_target(tmp_path, model_type, **shape)
    monkeypatch.setattr(copy, "deepcopy", lambda cache: None)
    with pytest.raises(ModelError, match=f"^{model_type}: needed equal logits with and without its cache, found"):
        check_cache(target)


def test_a_target_that_counts_positions_from_the_start_of_a_pass_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type, shape = TARGETS["bamba"]
    _, target = make_target(tmp_path, model_type, **shape)
    forward = target.model.forward
    monkeypatch.setattr(target.model, "forward", lambda *args, **inputs: forward(*args, **(inputs | {"position_ids": None})))
    with pytest.raises(ModelError, match=r"^bamba: needed equal logits with and without its cache, found"):
        check_cache(target)


def test_cache_layers_that_nobody_proved_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class UnheardOfLayer(DynamicLayer):  # type: ignore[no-untyped-call]
        """A layer of a later version of transformers."""

    _, target = make_target(tmp_path, "llama")
    monkeypatch.setitem(cache_utils.DYNAMIC_LAYER_TYPE_MAPPING, "full_attention", UnheardOfLayer)
    with pytest.raises(ModelError, match=r"^llama: needed a cache whose layers .*, found UnheardOfLayer$"):
        TargetCache(target)


def test_a_target_with_a_cache_of_its_own_is_refused(tmp_path: Path) -> None:
    _, target = make_target(tmp_path, "minimax", num_local_experts=2)
    with pytest.raises(ModelError, match=r"^minimax: cannot be decoded with a cache: MiniMax uses cache of its own"):
        check_cache(target)
