"""Answers that part: equal logits are a tie, others are not, whatever the type."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import make_target

from launch.decoding.difference import find_difference
from tests.launch.small_decodings import greedy

PROMPT = [9, 4, 1]


@pytest.fixture(params=["float32", "bfloat16"])
def target(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    return make_target(tmp_path, "qwen3")[1].to(getattr(torch, request.param))


def test_equal_answers_do_not_differ(target: Any) -> None:
    assert find_difference(target, PROMPT, [1, 2, 3], [1, 2, 3], together=True) is None


def test_two_tokens_with_one_row_of_the_head_are_a_tie(target: Any) -> None:
    plain = greedy(target, PROMPT, 9).tokens
    twin = next(token for token in range(64) if token not in plain)
    with torch.no_grad():
        target.lm_head.weight[twin] = target.lm_head.weight[plain[5]]
    found = find_difference(target, PROMPT, plain, [*plain[:5], twin, 1, 2, 3], together=True)
    assert found is not None
    assert (found.place, found.plain_token, found.speculative_token) == (5, plain[5], twin)
    assert found.gap == 0.0
    assert found.is_tie


@pytest.mark.parametrize("together", [False, True])
def test_a_token_that_the_target_would_not_choose_is_none(target: Any, together: bool) -> None:
    plain = greedy(target, PROMPT, 9).tokens
    found = find_difference(target, PROMPT, plain, [*plain[:8], (plain[8] + 1) % 64], together=together)
    assert found is not None
    assert found.place == 8
    assert found.gap is not None and found.rounding is not None
    assert 0 <= found.rounding < found.gap
    assert not found.is_tie


def test_an_answer_that_ends_early_is_none(target: Any) -> None:
    plain = greedy(target, PROMPT, 9).tokens
    found = find_difference(target, PROMPT, plain, plain[:4], together=False)
    assert found is not None
    assert (found.place, found.plain_token, found.speculative_token) == (4, plain[4], None)
    assert not found.is_tie
