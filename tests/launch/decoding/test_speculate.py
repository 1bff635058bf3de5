"""Acceptance tests 4, 6 and 7: inference equals training, speculation equals greedy, the exact count equals decoding.

Shapes: N blocks, B block size, V vocabulary.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from common.config import Config
from common.errors import DataError
from launch.decoding.answer import Limits
from launch.decoding.block_drafter import BlockDrafter
from launch.decoding.cases import Case
from launch.decoding.comparison import Comparison
from launch.decoding.pair import Pair
from launch.decoding.speculate import decode
from services.drafter.model.acceptance import summarise
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_hidden
from tests.builders.small_decodings import (
    DFLASH2,
    KINDS,
    PROMPTS,
    TARGETS,
    begin,
    blocks_of,
    drafted,
    greedy,
    measure,
    once,
    overfit,
    pack,
)
from tests.builders.targets import make_target


@torch.no_grad()
@pytest.mark.parametrize(("model_type", "settings"), [("llama", ()), ("qwen3", ()), ("qwen3", DFLASH2)])
def test_training_forward_equals_inference_step(tmp_path: Path, model_type: str, settings: tuple[str, ...]) -> None:
    config, target = make_target(tmp_path, model_type, *settings)
    embedding: Any = target.get_input_embeddings().weight
    tokens = np.random.Generator(np.random.Philox(1)).integers(0, 60, 40).tolist()
    batch = pack(config, target, [tokens[:2], tokens[10:13], tokens[30:31]], [tokens[2:10], tokens[13:30], tokens[31:]])
    draft, blocks = begin(config), blocks_of(batch, config)
    trained = block_hidden(draft, embedding, batch, blocks, config)
    trained = trained.view(len(blocks.anchors), config.draft.block_size, -1)
    assert not blocks.valid.all()  # unused blocks stood beside the others

    for document, start in enumerate(batch.cu_seqlens[:-1].tolist()):
        drafter, known = BlockDrafter(draft, config.draft, target), start
        for block in np.flatnonzero(blocks.valid & (blocks.documents == document)):
            anchor = int(blocks.anchors[block])
            drafter.append(batch.hidden_states[known:anchor])
            known = anchor
            hidden = drafter.hidden(int(batch.input_ids[anchor]))
            torch.testing.assert_close(hidden, trained[block], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("model_type", "settings"), [("llama", ()), ("qwen3", ()), ("qwen3", DFLASH2)])
def test_untrained_draft_gives_the_greedy_tokens(tmp_path: Path, model_type: str, settings: tuple[str, ...]) -> None:
    config, target = make_target(tmp_path, model_type, *settings)
    draft = begin(config)
    for prompt in PROMPTS:
        for max_new_tokens in (1, 2, 3, 20):
            plain = greedy(target, prompt, max_new_tokens)
            fast = drafted(target, draft, config, prompt, max_new_tokens)
            assert fast.tokens == plain.tokens
            assert len(plain.tokens) == plain.num_target_passes == max_new_tokens
            assert fast.num_target_passes == 1 + len(fast.accepted)
            assert max_new_tokens == 1 + sum(accepted + 1 for accepted in fast.accepted)


@pytest.mark.parametrize(("model_type", "shape"), KINDS)
def test_trained_draft_gives_the_greedy_tokens(tmp_path: Path, model_type: str, shape: dict[str, Any]) -> None:
    check_trained_draft(*make_target(tmp_path, model_type, **shape))


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_next"])
def test_trained_selector_gives_the_greedy_tokens(tmp_path: Path, kind: str) -> None:
    model_type, shape = TARGETS[kind]
    check_trained_draft(*make_target(tmp_path, model_type, *DFLASH2, **shape))


def check_trained_draft(config: Config, target: Any) -> None:
    answers = [greedy(target, prompt, 32).tokens for prompt in PROMPTS]
    draft = overfit(config, target, pack(config, target, PROMPTS[:3], answers[:3]))
    accepted = []
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        for max_new_tokens in (2, 13, 14, 15, 32):
            fast = drafted(target, draft, config, prompt, max_new_tokens)
            assert fast.tokens == answer[:max_new_tokens]
            accepted += fast.accepted
        for stop_token in answer[3:6]:
            end = answer.index(stop_token) + 1
            fast = drafted(target, draft, config, prompt, 32, stop_tokens=[stop_token])
            assert fast.tokens == greedy(target, prompt, 32, stop_tokens=[stop_token]).tokens == answer[:end]
            assert end == 1 + sum(accepted + 1 for accepted in fast.accepted)
    assert set(accepted) == {0, 1, 2, 3}  # every outcome of a block of four was really met
    assert sum(accepted) > 0.3 * len(accepted)


def test_greedy_equals_generate(tmp_path: Path) -> None:
    target: Any = make_target(tmp_path, "qwen3")[1]
    for prompt in PROMPTS:
        generated = target.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
        assert greedy(target, prompt, 20).tokens == generated[0, len(prompt) :].tolist()


COUNTED = [((), 0, 1.0, 1.3), ((), 15, 1.3, 2.5), ((), 80, 2.5, 4.0), (DFLASH2, 15, 1.3, 2.5), (DFLASH2, 25, 2.5, 4.0)]


@pytest.mark.parametrize(("settings", "num_steps", "least", "most"), COUNTED)
def test_exact_count_equals_real_decoding(
    tmp_path: Path, settings: tuple[str, ...], num_steps: int, least: float, most: float
) -> None:
    config, target = make_target(tmp_path, "qwen3", *settings)
    lengths = [1, 2, 30, 23]
    answers = [greedy(target, prompt, length).tokens for prompt, length in zip(PROMPTS, lengths, strict=True)]
    batch = pack(config, target, PROMPTS, answers)
    draft = overfit(config, target, batch, num_steps)
    decoded = np.zeros((len(PROMPTS), config.draft.block_size), dtype=np.int64)
    for rounds, prompt, answer in zip(decoded, PROMPTS, answers, strict=True):
        for accepted in drafted(target, draft, config, prompt, len(answer)).accepted:
            rounds[accepted] += 1
    counted, of_selector = measure(config, target, draft, batch)
    assert np.array_equal(counted, decoded)  # round by round, of every length
    found = summarise(counted.sum(0))
    assert found.num_tokens == sum(lengths) - len(lengths)
    assert least <= found.acceptance <= most  # so that short and long jumps were met
    if settings:
        assert not np.array_equal(of_selector[0], counted.sum(0))  # the likeliest tokens give other rounds


def test_bad_lengths_are_refused(tmp_path: Path) -> None:
    _, target = make_target(tmp_path, "llama")
    with pytest.raises(DataError, match="prompt: needed 1 to 512 tokens, found 0"):
        decode(target, [], Limits(4))
    with pytest.raises(DataError, match="prompt: needed 1 to 512 tokens, found 513"):
        decode(target, [1] * 513, Limits(4))
    with pytest.raises(DataError, match="max_new_tokens: needed at least 1, found 0"):
        decode(target, [1], Limits(0))


def test_where_the_positions_of_the_target_end(tmp_path: Path) -> None:
    config, target = make_target(tmp_path, "qwen3", max_position_embeddings=20)
    draft = DraftModel(config)
    for prompt in ([7] * 20, [8] * 19, [9] * 15, [3]):
        answer = greedy(target, prompt, 99)
        assert len(prompt) + len(answer.tokens) == 21  # the last token needs no position
        assert drafted(target, draft, config, prompt, 99).tokens == answer.tokens


def test_positions_past_the_end_are_never_computed(tmp_path: Path) -> None:
    config, target = make_target(tmp_path, "qwen3", max_position_embeddings=20)
    longest = 0

    def note(module: Any, arguments: tuple[Any, ...]) -> None:
        nonlocal longest
        longest = max(longest, int(arguments[1].max()))

    target.model.rotary_emb.register_forward_pre_hook(note)
    for prompt in ([7] * 14, [3, 4]):
        drafted(target, DraftModel(config), config, prompt, 99)
    assert longest == 19


def test_warming_up_fits_any_target_and_changes_no_answer(tmp_path: Path) -> None:
    config, target = make_target(tmp_path, "qwen3", max_position_embeddings=20)
    comparison = Comparison(Pair(target, DraftModel(config), config.draft), Limits(9), seed=0)
    comparison.warm_up()
    turns = list(comparison.run([Case(str(number), "all", once([number])) for number in range(2)]))
    assert [turn.plain for turn in turns] == [greedy(target, [number], 9) for number in range(2)]
    assert not any(turn.difference for turn in turns)
