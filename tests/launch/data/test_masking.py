"""Loss masks under the templates of four families: what the target said, to the token, and nothing else."""

from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from common.data.arrow_file import Sample
from launch.data.conversations import Conversation, Message, read_row
from launch.data.masking import Masker
from launch.data.rules import Changed, Dropped, Outcome
from tests.builders.chat_templates import GEMMA, LLAMA3, MISTRAL, QWEN3, Family
from tests.builders.supervised import read_supervised, read_text
from tests.builders.tiny_chat_model import CHATML, END, make_tokenizer

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
USER_2, ANSWER_2 = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So"}
SYSTEM = {"role": "system", "content": "Be kind"}
FAMILIES = {"qwen3": QWEN3, "llama3": LLAMA3, "gemma": GEMMA, "mistral": MISTRAL}
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}]


def mask(tokenizer: PreTrainedTokenizerBase, *messages: Message, settings: dict[str, Any] | None = None, **row: Any) -> Outcome:
    conversation = read_row({"messages": list(messages), **row})
    assert isinstance(conversation, Conversation)
    ends = {tokenizer.eos_token_id}
    return Masker(tokenizer, ends, settings).mask(conversation)


def mask_one(tokenizer: PreTrainedTokenizerBase, *messages: Message, **options: Any) -> Sample:
    [sample] = mask(tokenizer, *messages, **options).samples
    return sample


@pytest.mark.parametrize(
    ("name", "text", "answer"),
    [
        (
            "qwen3",
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nHello<|im_end|>",
            "<think>\n\n</think>\n\nHello<|im_end|>",
        ),
        (
            "llama3",
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>",
            "Hello<|eot_id|>",
        ),
        (
            "gemma",
            "<bos><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>",
            "Hello<end_of_turn>",
        ),
        ("mistral", "<s>[INST] Hi[/INST] Hello</s>", " Hello</s>"),
    ],
)
def test_stock_templates_supervise_the_answer_to_its_end_token(name: str, text: str, answer: str) -> None:
    """None of them has {% generation %}: the mask is not empty all the same."""
    assert "{% generation" not in FAMILIES[name].template
    tokenizer = FAMILIES[name].tokenizer()
    outcome = mask(tokenizer, USER, ANSWER)
    assert outcome.reason is None
    [sample] = outcome.samples
    assert (read_text(tokenizer, sample), read_supervised(tokenizer, sample)) == (text, [answer])


@pytest.mark.parametrize(
    ("family", "answers"),
    [(LLAMA3, ["Hello<|eot_id|>", "So<|eot_id|>"]), (GEMMA, ["Hello<end_of_turn>", "So<end_of_turn>"])],
)
def test_every_answer_of_a_conversation_stands_in_one_row(family: Family, answers: list[str]) -> None:
    tokenizer = family.tokenizer()
    outcome = mask(tokenizer, USER, ANSWER, USER_2, ANSWER_2)
    assert outcome.reason is None and len(outcome.samples) == 1
    assert read_supervised(tokenizer, outcome.samples[0]) == answers


def test_the_generation_prompts_own_text_is_not_supervised() -> None:
    """With thinking off the template, not the target, writes the empty think block."""
    tokenizer = QWEN3.tokenizer()
    sample = mask_one(tokenizer, USER, ANSWER, settings={"enable_thinking": False})
    assert read_supervised(tokenizer, sample) == ["Hello<|im_end|>"]
    assert "<think>\n\n</think>\n\nHello" in read_text(tokenizer, sample)


def test_a_thinking_conversation_becomes_one_row_per_answer_as_it_was_served() -> None:
    tokenizer = QWEN3.tokenizer()
    first, second = ANSWER | {"reasoning_content": "greet"}, ANSWER_2 | {"reasoning_content": "explain"}
    outcome = mask(tokenizer, USER, first, USER_2, second)
    assert outcome.reason is Changed.PER_TURN
    assert [read_text(tokenizer, sample) for sample in outcome.samples] == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\ngreet\n</think>\n\nHello<|im_end|>",
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>\nexplain\n</think>\n\nSo<|im_end|>",
    ]
    assert [read_supervised(tokenizer, sample) for sample in outcome.samples] == [
        ["<think>\ngreet\n</think>\n\nHello<|im_end|>"],
        ["<think>\nexplain\n</think>\n\nSo<|im_end|>"],
    ]


def test_a_system_text_that_moves_makes_one_row_per_answer_too() -> None:
    tokenizer = MISTRAL.tokenizer()
    outcome = mask(tokenizer, SYSTEM, USER, ANSWER, USER_2, ANSWER_2)
    assert outcome.reason is Changed.PER_TURN
    assert [read_text(tokenizer, sample) for sample in outcome.samples] == [
        "<s>[INST] Be kind\n\nHi[/INST] Hello</s>",
        "<s>[INST] Hi[/INST] Hello</s>[INST] Be kind\n\nWhy?[/INST] So</s>",
    ]
    assert [read_supervised(tokenizer, sample) for sample in outcome.samples] == [[" Hello</s>"], [" So</s>"]]


def test_thinking_between_tool_calls_stays_in_one_row() -> None:
    """Content null with tool calls; arguments as JSON text; the result is not supervised."""
    tokenizer = QWEN3.tokenizer()
    call = {"type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "look"}
    result = {"role": "tool", "content": "rain"}
    outcome = mask(tokenizer, USER, asks, result, ANSWER | {"reasoning_content": "say"}, tools=WEATHER)
    assert outcome.reason is None and len(outcome.samples) == 1
    assert read_supervised(tokenizer, outcome.samples[0]) == [
        '<think>\nlook\n</think>\n\n\n<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call><|im_end|>',
        "<think>\nsay\n</think>\n\nHello<|im_end|>",
    ]
    text = read_text(tokenizer, outcome.samples[0])
    assert "<tool_response>\nrain\n</tool_response>" in text and '"name": "weather", "parameters"' in text


@pytest.mark.parametrize("family", [QWEN3, LLAMA3])
def test_two_questions_in_a_row_are_rendered_where_the_template_takes_them(family: Family) -> None:
    tokenizer = family.tokenizer()
    [answer] = read_supervised(tokenizer, mask_one(tokenizer, USER, USER_2, ANSWER))
    assert answer.endswith(f"Hello{family.end}")


@pytest.mark.parametrize(
    ("family", "messages"),
    [(GEMMA, [USER, USER_2, ANSWER]), (MISTRAL, [USER, USER_2, ANSWER]), (GEMMA, [SYSTEM, USER, ANSWER])],
)
def test_what_a_template_refuses_is_dropped_by_that_name(family: Family, messages: list[Message]) -> None:
    refusal = "no system turn" if messages[0] is SYSTEM else "turns must alternate"
    assert mask(family.tokenizer(), *messages) == Outcome([], Dropped.REFUSED, refusal)


def test_a_template_that_fails_in_python_refuses_too() -> None:
    tokenizer = make_tokenizer(CHATML.replace("message.content", "message.content + message.name"))
    outcome = mask(tokenizer, USER, ANSWER)
    assert outcome.reason is Dropped.REFUSED and "has no attribute 'name'" in outcome.refusal


def test_quoted_markers_are_only_text() -> None:
    tokenizer = make_tokenizer()
    quotes = {"role": "user", "content": "Say <|im_start|>assistant\nYes<|im_end|>"}
    assert read_supervised(tokenizer, mask_one(tokenizer, quotes, ANSWER)) == [f"Hello{END}"]


def test_an_answer_that_does_not_go_on_from_its_generation_prompt_is_dropped() -> None:
    tokenizer = make_tokenizer(CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'"))
    assert mask(tokenizer, USER, ANSWER) == Outcome([], Dropped.REWRITTEN)
    thinks = {"role": "assistant", "content": "<think>\nhm\n</think>Hello"}
    outcome = mask(tokenizer, USER, ANSWER, USER_2, thinks)
    assert outcome.reason is Changed.SOME_TURNS
    assert [read_supervised(tokenizer, sample) for sample in outcome.samples] == [[f"hm\n</think>Hello{END}"]]


def test_an_empty_answer_is_not_supervised_but_stays() -> None:
    tokenizer = make_tokenizer()
    empty = {"role": "assistant", "content": " \n"}
    outcome = mask(tokenizer, USER, empty, USER_2, ANSWER)
    assert outcome.reason is Changed.EMPTY_ANSWER
    assert read_supervised(tokenizer, outcome.samples[0]) == [f"Hello{END}"]
    assert mask(tokenizer, USER, empty) == Outcome([], Dropped.NOT_SUPERVISED)


def test_an_answer_of_weight_0_is_not_supervised_but_stays() -> None:
    tokenizer = make_tokenizer()
    sample = mask_one(tokenizer, USER, ANSWER | {"weight": 0}, USER_2, ANSWER_2)
    assert read_supervised(tokenizer, sample) == [f"So{END}"]
    assert "Hello" in read_text(tokenizer, sample)


def test_an_answer_cut_at_its_limit_is_not_taught_to_stop() -> None:
    tokenizer = make_tokenizer()
    outcome = mask(tokenizer, USER, ANSWER, USER_2, ANSWER_2, finished=False)
    assert outcome.reason is Changed.UNFINISHED
    assert read_supervised(tokenizer, outcome.samples[0]) == [f"Hello{END}", "So"]
    assert read_text(tokenizer, outcome.samples[0]).endswith("So")


def test_what_follows_the_last_answer_is_left_out() -> None:
    tokenizer = make_tokenizer()
    assert read_text(tokenizer, mask_one(tokenizer, USER, ANSWER, USER_2)).endswith(f"Hello{END}")
