"""Answers that part: equal logits are a tie, others are not, whatever the type."""

from pathlib import Path
from typing import Any

import pytest
import torch

from launch.decoding.difference import find_difference
from tests.builders.small_decodings import greedy
from tests.builders.targets import make_target

PROMPT = [9, 4, 1]


@pytest.fixture(params=["float32", "bfloat16"])
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    return make_target(tmp_path, "qwen3")[1].to(getattr(torch, request.param))


def test_equal_answers_do_not_differ(target: Any) -> None:
    assert find_difference(target, PROMPT, [1, 2, 3], [1, 2, 3]) is None


def test_two_tokens_with_one_row_of_the_head_are_a_tie(target: Any) -> None:
    plain = greedy(target, PROMPT, 9).tokens
    twin = next(token for token in range(64) if token not in plain)
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[plain[5]]
    found = find_difference(target, PROMPT, plain, [*plain[:5], twin, 1, 2, 3])
    assert found is not None
    assert (found.index, found.plain_token, found.speculative_token) == (5, plain[5], twin)
    assert found.gap == 0.0
    assert found.is_tie


def test_neighbours_in_the_type_of_the_logits_are_a_tie(tmp_path: Path) -> None:
    """All ways may round alike: then the last place of a logit is what rounding can move."""
    target: Any = make_target(tmp_path, "qwen3")[1].to(torch.bfloat16)
    with torch.no_grad():
        for layer in target.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.lm_head.weight.zero_()
        target.lm_head.weight[7:10, 0] = torch.tensor([1.0, 1 + 2**-7, 1 + 2**-5])
    found, further = (find_difference(target, PROMPT, [7], [token]) for token in (8, 9))
    assert found is not None and further is not None
    assert found.gap and found.rounding and further.gap and further.rounding
    assert found.gap == found.rounding
    assert found.is_tie
    assert further.gap >= 3 * further.rounding
    assert not further.is_tie


def test_a_token_that_the_target_would_not_choose_is_none(target: Any) -> None:
    plain = greedy(target, PROMPT, 9).tokens
    found = find_difference(target, PROMPT, plain, [*plain[:8], (plain[8] + 1) % 64])
    assert found is not None
    assert found.index == 8
    assert found.gap is not None and found.rounding is not None
    assert 0 <= found.rounding < found.gap
    assert not found.is_tie


def test_an_answer_that_ends_early_is_none(target: Any) -> None:
    plain = greedy(target, PROMPT, 9).tokens
    found = find_difference(target, PROMPT, plain, plain[:4])
    assert found is not None
    assert (found.index, found.plain_token, found.speculative_token) == (4, plain[4], None)
    assert not found.is_tie
