"""Kinds of chat templates: reasoning under another key, calls left out or joined to text, answers without an end token."""

import pytest

from launch.data.chat import render_text
from launch.data.conversations import Conversation, Message, read_row
from launch.data.masking import Masker
from launch.data.rules import Changed, Dropped, Outcome
from tests.builders.chat_templates import DEEPSEEK, DEEPSEEK_R1, GLM, GPT_OSS, QWEN3, Family
from tests.builders.supervised import read_supervised, read_text
from tests.builders.tiny_chat_model import CHATML, END, START

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
USER_2, ANSWER_2 = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So"}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ulm"}}}
ASKS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "rain"}
PLAIN = Family(CHATML.replace("{{ raise_exception('no tools') }}", ""), (START, END), END)
WEATHER = [{"type": "function", "function": {"name": "weather", "parameters": {"city": "string"}}}]


def mask(family: Family, *messages: Message, ends: tuple[str, ...] = (), **row: object) -> tuple[Outcome, list[list[str]]]:
    """Return the outcome, and the supervised texts of every sample."""
    tokenizer = family.tokenizer()
    conversation = read_row({"messages": list(messages), **row})
    assert isinstance(conversation, Conversation)
    end_ids = {tokenizer.get_vocab()[end] for end in (*ends, family.end)}
    outcome = Masker(tokenizer, end_ids).mask(conversation)
    return outcome, [read_supervised(tokenizer, sample) for sample in outcome.samples]


def mask_glm(*messages: Message, **row: object) -> tuple[Outcome, list[list[str]]]:
    return mask(GLM, *messages, ends=("<|user|>", "<|observation|>"), **row)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_given_under_the_key_that_the_template_reads(key: str) -> None:
    outcome, texts = mask(GPT_OSS, USER, ANSWER | {key: "add them"})
    assert outcome.reason is None
    said = "<|channel|>analysis<|message|>add them<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>"
    assert texts == [[said]]


def test_an_answer_without_an_end_token_ends_with_the_token_of_the_next_turn() -> None:
    outcome, texts = mask_glm(USER, ASKS, RESULT, ANSWER, USER_2, ANSWER_2)
    assert outcome.reason is None
    call = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call><|observation|>"
    assert texts == [[f"\n<think></think>\n\n{call}", "\n<think></think>\nHello<|user|>", "\n<think></think>\nSo<|user|>"]]
    text = read_text(GLM.tokenizer(), outcome.samples[0])
    assert text.count("<|user|>") == 3 and text.endswith("So<|user|>")


def test_reasoning_goes_on_being_shown_where_the_next_question_would_take_it_away() -> None:
    _, texts = mask_glm(USER, ANSWER | {"reasoning_content": "greet"}, USER_2, ANSWER_2 | {"reasoning_content": "explain"})
    think = "\n<think>\n{}\n</think>\n\n"
    assert texts == [[f"{think.format('greet')}Hello<|user|>"], [f"{think.format('explain')}So<|user|>"]]


@pytest.mark.parametrize(
    ("family", "start"), [(GLM, "\n<think>\n"), (QWEN3, "<think>\n"), (GPT_OSS, "<|channel|>analysis<|message|>")]
)
def test_an_answer_cut_within_its_reasoning_is_taught_what_was_said(family: Family, start: str) -> None:
    cut = {"role": "assistant", "content": "", "reasoning_content": "let me think about"}
    outcome, texts = mask(family, USER, cut, ends=("<|user|>",) if family is GLM else (), finished=False)
    assert outcome.reason is Changed.UNFINISHED
    assert texts == [[f"{start}let me think about"]]
    assert read_text(family.tokenizer(), outcome.samples[0]).endswith("let me think about")


def test_an_answer_cut_in_its_text_keeps_its_last_space() -> None:
    _, texts = mask(PLAIN, USER, {"role": "assistant", "content": "Hello "}, finished=False)
    assert texts == [["Hello "]]


def test_a_call_that_the_template_does_not_show_is_not_supervised() -> None:
    """Else its end token alone would be: "stop at once"."""
    assert mask(PLAIN, USER, ASKS)[0] == Outcome([], Dropped.UNSEEN_CALL)
    assert mask(PLAIN, USER, ASKS | {"content": "I ask for the weather"})[0] == Outcome([], Dropped.UNSEEN_CALL)
    outcome, texts = mask(PLAIN, USER, ASKS, RESULT, ANSWER)
    assert outcome.reason is Changed.UNSEEN_CALL
    assert texts == [[f"Hello{END}"]]


def test_tools_that_the_template_does_not_show_are_counted() -> None:
    assert mask(PLAIN, USER, ANSWER, tools=WEATHER)[0].reason is Changed.UNSEEN_TOOLS
    assert mask(QWEN3, USER, ANSWER, tools=WEATHER)[0].reason is None


@pytest.mark.parametrize("row", [{"functions": [WEATHER[0]["function"]]}, {"tools": WEATHER}])
def test_tools_of_every_form_are_in_the_prompt(row: dict[str, object]) -> None:
    outcome, _ = mask(QWEN3, {"role": "system", "content": "Be kind"} | row, USER, ANSWER)
    assert outcome.reason is None
    assert '"function": {"name": "weather", "parameters": {"city": "string"}}' in read_text(
        QWEN3.tokenizer(), outcome.samples[0]
    )


def test_a_template_that_joins_arguments_to_text_is_given_their_json() -> None:
    outcome, texts = mask(DEEPSEEK, USER, ASKS, RESULT, ANSWER)
    assert outcome.reason is None
    call = '<|call|>function<|sep|>weather\n```json\n{"city": "Ulm"}\n```<|end of call|><|end|>'
    assert texts == [[call, "Hello<|end|>"]]


def test_arguments_are_not_printed_as_python_does_and_quoted_python_stays() -> None:
    prints = Family(QWEN3.template.replace("(call.function.arguments | tojson)", "call.function.arguments ~ ''"), *QWEN3[1:])
    quote = {"role": "user", "content": "print {'city': 'Ulm'}"}
    for family in (prints, QWEN3):
        text = render_text(family.tokenizer(), [quote, ASKS], generation_prompt=False)
        assert quote["content"] in text and '"arguments": {"city": "Ulm"}}' in text


def test_a_template_that_takes_reasoning_out_of_answers_drops_them_by_name() -> None:
    thinks = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"}
    assert mask(DEEPSEEK_R1, USER, thinks)[0] == Outcome([], Dropped.REWRITTEN)
    assert mask(DEEPSEEK, USER, thinks)[1] == [["\n\nHello<|end|>"]]


@pytest.mark.parametrize(
    ("family", "start"),
    [(GLM, "\n<think>\n"), (QWEN3, "<think>\n"), (GPT_OSS, "<|channel|>analysis<|message|>"), (PLAIN, "<think>\n")],
)
def test_an_answer_cut_within_a_block_of_its_text_is_taught_no_empty_block(family: Family, start: str) -> None:
    """Servers without a reasoning parser return the block as text."""
    cut = {"role": "assistant", "content": "<think>\nlet me think about"}
    outcome, texts = mask(family, USER, cut, ends=("<|user|>",) if family is GLM else (), finished=False)
    assert outcome.reason is Changed.UNFINISHED
    assert texts == [[f"{start}let me think about"]]
