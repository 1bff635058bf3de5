"""Rows in every form that people write them in, and the rules that drop those that cannot be read."""

import json
from typing import Any

import pytest

from launch.data.conversations import Conversation, read_row
from launch.data.rules import Changed, Dropped, Outcome

HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}


def read(row: object) -> Conversation:
    conversation = read_row(row)
    assert isinstance(conversation, Conversation), conversation
    return conversation


def rule_of(row: object) -> Dropped:
    outcome = read_row(row)
    assert isinstance(outcome, Outcome) and not outcome.samples
    assert isinstance(outcome.reason, Dropped)
    return outcome.reason


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [HI, HELLO]},
        {"conversations": [HI, HELLO]},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"messages": [{"role": "User", "content": [{"type": "text", "text": "Hi"}]}, {"role": "model", "content": "Hello"}]},
        {"messages": json.dumps([HI, HELLO])},
        {"messages": [HI, HELLO, {"role": "user", "content": "never answered"}], "conversations": None, "tools": None},
        json.dumps({"id": 1, "messages": [HI, HELLO]}).encode(),
    ],
)
def test_one_conversation_in_every_form(row: object) -> None:
    assert read(row) == Conversation([HI, HELLO])


def test_a_system_text_may_stand_beside_the_turns() -> None:
    system = {"role": "system", "content": "Be kind"}
    assert read({"system": "Be kind", "conversations": [HI, HELLO]}).messages == [system, HI, HELLO]
    assert read({"system": "no", "conversations": [system, HI, HELLO]}).messages == [system, HI, HELLO]


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]', ['{"name": "f"}']])
def test_tools_are_a_list_or_its_json(tools: object) -> None:
    assert read({"messages": [HI, HELLO], "tools": tools}).tools == [{"name": "f"}]


@pytest.mark.parametrize("key", ["tools", "functions"])
@pytest.mark.parametrize("in_system", [True, False])
def test_tools_stand_in_the_system_turn_or_under_functions_too(key: str, *, in_system: bool) -> None:
    function = {"name": "f", "parameters": {}}
    tool = {"type": "function", "function": function}
    given = {key: json.dumps([function if key == "functions" else tool])}
    system = {"role": "system", "content": "Be kind"}
    row = {"messages": [system | given, HI, HELLO]} if in_system else {"messages": [system, HI, HELLO]} | given
    assert read(row) == Conversation([system, HI, HELLO], [tool])


def test_a_function_call_is_a_tool_call() -> None:
    asks = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}
    assert read({"messages": [HI, asks]}).messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
    }


@pytest.mark.parametrize("tools", [None, "", [], "[]"])
def test_no_tools_are_none(tools: object) -> None:
    assert read({"messages": [HI, HELLO], "tools": tools}).tools is None


def test_null_content_with_tool_calls_is_an_empty_text_and_arguments_are_objects() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    bare = {"name": "g", "arguments": {"y": None}}
    asks = {"role": "assistant", "content": None, "tool_calls": [call, bare]}
    result = {"role": "tool", "content": "2", "tool_call_id": "c1"}
    read_asks = read({"messages": [HI, asks, result, HELLO]}).messages
    assert read_asks[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
            {"type": "function", "function": {"name": "g", "arguments": {"y": None}}},
        ],
    }
    assert read_asks[2] == result


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(key: str) -> None:
    assert read({"messages": [HI, HELLO | {key: "hm"}]}).messages[1] == HELLO | {"reasoning_content": "hm"}


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        (b"{", Dropped.NOT_JSON),
        (b'{"messages": "\xff"}', Dropped.NOT_JSON),
        (b"null", Dropped.NO_CONVERSATION),
        (b"[1]", Dropped.NO_CONVERSATION),
        ({"text": "Hi"}, Dropped.NO_CONVERSATION),
        ({"messages": None}, Dropped.NO_CONVERSATION),
        ({"messages": "Hi"}, Dropped.NO_CONVERSATION),
        ({"messages": []}, Dropped.EMPTY),
        ({"messages": [None, HELLO]}, Dropped.BAD_MESSAGE),
        ({"messages": [{"content": "Hi"}, HELLO]}, Dropped.BAD_MESSAGE),
        ({"messages": [HI, {"role": "assistant", "content": None}]}, Dropped.BAD_MESSAGE),
        ({"messages": [HI, {"role": "assistant", "content": [{"type": "image"}]}]}, Dropped.BAD_MESSAGE),
        ({"messages": [HI, {"role": "Qwen3-8B", "content": "Hello"}]}, Dropped.UNKNOWN_ROLE),
        ({"messages": [{"role": "system", "content": "Be kind"}]}, Dropped.NO_ANSWER),
        ({"messages": [HI]}, Dropped.NO_ANSWER),
        ({"messages": [HELLO]}, Dropped.NO_QUESTION),
        ({"messages": [HI, HELLO], "tools": '[{"name": '}, Dropped.BAD_TOOLS),
        ({"messages": [HI, HELLO], "tools": {"name": "f"}}, Dropped.BAD_TOOLS),
        ({"messages": [HI, HELLO], "tools": ["f"]}, Dropped.BAD_TOOLS),
        ({"messages": [HI, HELLO | {"tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, Dropped.BAD_TOOL_CALLS),
        ({"messages": [HI, HELLO | {"tool_calls": ["f"]}]}, Dropped.BAD_TOOL_CALLS),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "gpt", "content": "x"}]}', Dropped.BAD_TEXT),
        ({"input_ids": [1, 2], "loss_mask": [1]}, Dropped.BAD_IDS),
        ({"input_ids": [1, "2"], "loss_mask": [1, 1]}, Dropped.BAD_IDS),
        ({"input_ids": [1, 2**31], "loss_mask": [1, 1]}, Dropped.BAD_IDS),
        ({"input_ids": [1, 2], "loss_mask": [1, 2]}, Dropped.BAD_IDS),
        ({"prompt_ids": [1], "answer_ids": None}, Dropped.BAD_IDS),
        ({"answers": [{"prompt_ids": [1]}]}, Dropped.BAD_IDS),
    ],
)
def test_what_cannot_be_read_has_a_name(row: object, rule: Dropped) -> None:
    assert rule_of(row) is rule


def test_a_name_of_the_assistant_can_be_given() -> None:
    row = {"messages": [HI, {"role": "Qwen3-8B", "content": "Hello"}]}
    assert read_row(row, {"qwen3-8b": "assistant"}) == Conversation([HI, HELLO])


def test_answers_before_the_first_question_are_removed() -> None:
    system = {"role": "system", "content": "Be kind"}
    conversation = read({"messages": [system, HELLO, HI, HELLO]})
    assert conversation == Conversation([system, HI, HELLO], changed=Changed.LEADING_ANSWER)


def test_unicode_is_kept() -> None:
    text = "\u00e4\U0001f600\u0000\u202e\ufffe e\u0301"
    assert read({"messages": [{"role": "user", "content": text}, HELLO]}).messages[0]["content"] == text


def samples_of(row: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    outcome = read_row(row)
    assert isinstance(outcome, Outcome)
    return [(sample.input_ids.tolist(), sample.loss_mask.astype(int).tolist()) for sample in outcome.samples]


def test_ids_are_used_as_they_are() -> None:
    assert samples_of({"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}) == [([5, 6, 7], [0, 1, 1])]
    assert samples_of({"messages": [HI, HELLO], "prompt_ids": [5], "answer_ids": [6, 7]}) == [([5, 6, 7], [0, 1, 1])]


def test_answers_that_go_on_from_each_other_are_one_row_and_others_are_not() -> None:
    first = {"prompt_ids": [1, 2], "answer_ids": [3, 4]}
    goes_on = {"prompt_ids": [1, 2, 3, 4, 5], "answer_ids": [6]}
    rewritten = {"prompt_ids": [1, 2, 4, 5], "answer_ids": [6, 7]}
    assert samples_of({"answers": [first, goes_on]}) == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1])]
    assert samples_of({"answers": [first, rewritten]}) == [
        ([1, 2, 3, 4], [0, 0, 1, 1]),
        ([1, 2, 4, 5, 6, 7], [0] * 4 + [1] * 2),
    ]


def test_keys_that_hold_null_are_absent() -> None:
    calls = [{"id": None, "name": "f", "arguments": {"x": 1}, "function": None}]
    turns = [
        {"from": "human", "value": "q1", "role": None, "content": None},
        {"from": "gpt", "value": None, "role": None, "content": None, "tool_calls": calls},
    ]
    read = read_row({"conversations": turns, "messages": None})
    assert isinstance(read, Conversation)
    assert read.messages[0] == {"role": "user", "content": "q1"}
    assert read.messages[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


@pytest.mark.parametrize("row", [{"answers": [5]}, {"answers": [None]}, {"answers": []}, {"prompt_ids": [1], "answer_ids": 3}])
def test_answers_that_are_no_ids_fall_under_a_rule(row: object) -> None:
    assert read_row(row) == Outcome([], Dropped.BAD_IDS)


def test_json_nested_too_deep_falls_under_a_rule() -> None:
    assert read_row(b"[" * 200_000) == Outcome([], Dropped.NOT_JSON)
