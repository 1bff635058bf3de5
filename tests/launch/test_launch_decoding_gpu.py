"""Decoding on a GPU in bfloat16: plain and with drafts, alone and together, of a random target of a middling size.

python -m pytest -q -s tests/launch/test_launch_decoding_gpu.py
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import make_target
from transformers import AutoModelForCausalLM

from launch.decoding.cases import Case, Turns
from launch.decoding.comparison import Comparison
from launch.decoding.pair import Pair
from launch.decoding.sampling import GREEDY, Sampling
from launch.decoding.speculate import Limits, decode
from launch.evaluation_report import Report, Setup, make_report
from tests.launch.cache_rounds import largest_error
from tests.launch.small_decodings import PROMPTS as SHORT_PROMPTS
from tests.launch.small_decodings import RECURRENT, overfit, pack

pytestmark = pytest.mark.gpu

MIDDLING = {
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.2,
}
HYBRID = RECURRENT | {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "hidden_size": 128, "head_dim": 32}
DRAFT = [
    "train.anchors_per_batch=200",
    "draft.block_size=8",
    "draft.mask_token_id=1023",
    "draft.tap_layers=[1, 4]",
    "draft.sliding_window=64",
]
NUM_THREADS = 8  # to learn by heart with
PROMPTS = [[5], [9, 4], list(range(100, 180)), [40, 41] * 20, list(range(900, 930)), [7] * 12, [1, 2, 3], [77, 78, 79, 80]]
NUM_LEARNT_TOKENS, NUM_NEW_TOKENS = 48, 96


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A drafter that has learnt how half of the answers begin by heart, on the CPU in float32; then both in bfloat16."""
    folder, limits = tmp_path_factory.mktemp("middling"), Limits(NUM_LEARNT_TOKENS)
    config, on_cpu = make_target(folder, "qwen3", *DRAFT, **MIDDLING)
    auto: Any = AutoModelForCausalLM
    target = auto.from_pretrained(folder / "target", dtype=torch.bfloat16).to("cuda").eval()
    answers = [decode(target, [prompt], limits).decodings[0].tokens for prompt in PROMPTS[:4]]
    torch.set_num_threads(NUM_THREADS)
    draft = overfit(config, on_cpu, pack(config, on_cpu, PROMPTS[:4], answers), num_steps=100)
    torch.set_num_threads(1)
    return Pair(target, draft.to("cuda", torch.bfloat16).eval(), config.draft)


def once(prompt: list[int]) -> Turns:
    yield prompt


def evaluate(pair: Pair, batch_size: int, sampling: Sampling) -> Report:
    comparison = Comparison(pair, Limits(NUM_NEW_TOKENS, (), sampling), seed=3, batch_size=batch_size)
    comparison.warm_up()
    cases = [Case(f"prompt {number}", "random", once(prompt)) for number, prompt in enumerate(PROMPTS)]
    setup = Setup(
        target="middling",
        drafter="by heart",
        dtype=str(pair.target.dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(),
        releases={},
        block_size=pair.config.block_size,
        batch_size=batch_size,
        max_new_tokens=NUM_NEW_TOKENS,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=3,
    )
    report = make_report(setup, list(comparison.run(cases)), {})
    print(f"\nbatch of {batch_size}, {sampling}\n" + "\n".join(report.lines()), flush=True)
    return report


@pytest.mark.parametrize("batch_size", [1, 4, 8])
def test_greedy_answers_are_the_same_but_for_ties(pair: Pair, batch_size: int) -> None:
    report = evaluate(pair, batch_size, GREEDY)
    assert report.total.lossless is not None
    assert report.total.lossless.num_other == 0
    assert report.total.acceptance > 1.1
    assert report.total.num_answer_tokens == NUM_NEW_TOKENS * len(PROMPTS)
    assert report.total.passes_saved > 0


def test_sampled_answers_end_and_accept(pair: Pair) -> None:
    report = evaluate(pair, 4, Sampling(0.7, 0.95))
    assert report.total.num_answer_tokens == NUM_NEW_TOKENS * len(PROMPTS)
    assert report.total.acceptance > 1.0


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_recurrent_target_equals_a_new_prefill(tmp_path: Path, num_rows: int) -> None:
    config, target = make_target(tmp_path, "qwen3_5_text", **HYBRID)
    error = largest_error(target.to("cuda"), config.draft.tap_layers, SHORT_PROMPTS[:num_rows])
    print(f"\nlargest error over largest logit, {num_rows} rows: {error:.2g}", flush=True)
    assert error < 0.01  # a state that was not put back is off by several percent


def test_in_float32_the_answers_are_the_same(pair: Pair) -> None:
    whole: Any = pair.target
    exact = Pair(whole.float(), pair.draft.float(), pair.config)
    assert evaluate(exact, 4, GREEDY).is_same
