"""Prompts decoded together get the answers that they get alone, greedily and sampling."""

from pathlib import Path
from typing import Any

import pytest

from launch.decoding.answer import Limits
from launch.decoding.cases import Case
from launch.decoding.comparison import Comparison
from launch.decoding.pair import Pair
from launch.decoding.sampling import GREEDY, Sampling
from launch.decoding.speculate import decode, speculate
from services.drafter.model.model import DraftModel
from tests.builders.small_decodings import KINDS, PROMPTS, greedy, once, overfit, pack
from tests.builders.targets import make_target

SAMPLED = Sampling(temperature=0.5, top_p=0.9)


@pytest.mark.parametrize(("model_type", "shape"), KINDS)
def test_together_as_alone(tmp_path: Path, model_type: str, shape: dict[str, Any]) -> None:
    config, target = make_target(tmp_path, model_type, **shape)
    answers = [greedy(target, prompt, 32).tokens for prompt in PROMPTS]
    draft = overfit(config, target, pack(config, target, PROMPTS[:3], answers[:3]))
    stop_tokens = [answers[1][9]]  # rows end at different times
    for sampling in (GREEDY, SAMPLED):
        limits = Limits(28, stop_tokens, sampling)
        seeds = [[5, number] for number in range(len(PROMPTS))]
        fast = speculate(target, draft, config.draft, PROMPTS, limits, seeds).decodings
        plain = decode(target, PROMPTS, limits, seeds).decodings
        for prompt, seed, plain_answer, fast_answer in zip(PROMPTS, seeds, plain, fast, strict=True):
            assert decode(target, [prompt], limits, [seed]).decodings == [plain_answer]
            assert speculate(target, draft, config.draft, [prompt], limits, [seed]).decodings == [fast_answer]
        if sampling is GREEDY:
            assert [answer.tokens for answer in fast] == [answer.tokens for answer in plain]
            assert len({len(answer.tokens) for answer in fast}) > 1
            assert len({len(answer.accepted) for answer in fast}) > 1


def test_where_the_positions_of_the_target_end(tmp_path: Path) -> None:
    config, target = make_target(tmp_path, "qwen3", max_position_embeddings=20)
    draft, prompts = DraftModel(config), [[7] * 20, [8] * 19, [9] * 15, [3]]
    whole = [[*prompt, *greedy(target, prompt, 99).tokens] for prompt in prompts]
    assert [len(text) for text in whole] == [21, 21, 21, 21]  # the last token needs no position
    for batch in ([0], [1], [2], [0, 1], [1, 2, 3], [0, 1, 2, 3]):
        chosen = [prompts[number] for number in batch]
        found = speculate(target, draft, config.draft, chosen, Limits(99)).decodings
        assert [[*prompt, *it.tokens] for prompt, it in zip(chosen, found, strict=True)] == [whole[number] for number in batch]


def test_positions_past_the_end_are_never_computed(tmp_path: Path) -> None:
    config, target = make_target(tmp_path, "qwen3", max_position_embeddings=20)
    longest = 0

    def note(module: Any, arguments: tuple[Any, ...]) -> None:
        nonlocal longest
        longest = max(longest, int(arguments[1].max()))

    target.model.rotary_emb.register_forward_pre_hook(note)
    speculate(target, DraftModel(config), config.draft, [[7] * 14, [3, 4]], Limits(99))
    assert longest == 19


def test_warming_up_fits_any_target_and_changes_no_answer(tmp_path: Path) -> None:
    config, target = make_target(tmp_path, "qwen3", max_position_embeddings=20)
    comparison = Comparison(Pair(target, DraftModel(config), config.draft), Limits(9), seed=0, batch_size=2)
    comparison.warm_up()
    (outcome,) = comparison.run([Case(str(number), "all", once([number])) for number in range(2)])
    assert [turn.plain for turn in outcome.turns] == [greedy(target, [number], 9) for number in range(2)]
    assert not any(turn.difference for turn in outcome.turns)
