"""Rows in every form that people write them in, and the rules that drop those that cannot be read."""

import json
from typing import Any

import numpy as np
import pytest

from common.data.arrow_file import Sample
from launch.data.conversations import Conversation, read_row
from launch.data.rules import Changed, Dropped, Limits, Outcome, Tally, check, check_all, format_report, histogram

HI, HELLO = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
LIMITS = Limits(vocab_size=100, max_length=6)


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


def make_sample(mask: list[int], first_id: int = 0) -> Sample:
    return Sample(np.arange(first_id, first_id + len(mask), dtype=np.int32), np.array(mask, np.bool_))


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        ([0, 0, 0], Dropped.NOT_SUPERVISED),
        ([], Dropped.NOT_SUPERVISED),
        ([0, 1, 0], Dropped.SINGLE),
        ([1, 0, 1], Dropped.SINGLE),
        ([0] * 5 + [1, 1], Dropped.TOO_LONG),
        ([0, 0, 0, 0, 1, 1], None),  # in the last block only: two are enough for it
        ([1, 1], None),
    ],
)
def test_what_can_be_learnt_from_is_kept(mask: list[int], rule: Dropped | None) -> None:
    sample = make_sample(mask)
    assert check(sample, LIMITS) is (rule or sample)


def test_ids_outside_the_vocabulary_are_dropped() -> None:
    assert check(make_sample([1, 1], first_id=99), LIMITS) is Dropped.UNKNOWN_ID
    assert check(make_sample([1, 1], first_id=-1), LIMITS) is Dropped.UNKNOWN_ID
    assert isinstance(check(make_sample([1, 1], first_id=98), LIMITS), Sample)


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]),  # inside the answer
        ([0, 0, 0, 0, 0, 1, 1, 1], Dropped.CUT_BEFORE_ANSWER),  # one supervised token is left
        ([0, 0, 0, 0, 0, 0, 0, 1, 1], Dropped.CUT_BEFORE_ANSWER),  # inside the prompt
    ],
)
def test_truncation_keeps_what_is_left_of_the_answer(mask: list[int], kept: list[int] | Dropped) -> None:
    outcome = check_all(Outcome([make_sample(mask)]), LIMITS._replace(truncate=True))
    if isinstance(kept, Dropped):
        assert outcome == Outcome([], kept)
    else:
        assert outcome.reason is Changed.TRUNCATED
        assert outcome.samples[0].loss_mask.astype(int).tolist() == kept


def test_a_row_of_which_some_samples_are_dropped_is_changed() -> None:
    good = make_sample([0, 1, 1])
    assert check_all(Outcome([good, make_sample([0, 0])], Changed.PER_TURN), LIMITS) == Outcome([good], Changed.SOME_TURNS)


def test_every_row_is_counted_once() -> None:
    tally = Tally()
    for outcome in (
        Outcome([make_sample([0, 1, 1])]),
        Outcome([make_sample([0] * 100 + [1] * 50), make_sample([1, 1])], Changed.PER_TURN),
        Outcome([], Dropped.REFUSED, "turns must alternate"),
        Outcome([], Dropped.REFUSED, "turns must alternate"),
        Outcome([make_sample([1, 1, 1, 0])], Changed.TRUNCATED),
    ):
        tally.count(outcome)
    report = tally.as_json()
    assert report == {
        "rows_in": 5,
        "rows_kept": 3,
        "changed": {"one row per answer, as it was served": 1, "cut at --max-length": 1},
        "dropped": {"refused by the chat template": 2},
        "refusals": {"turns must alternate": 2},
        "samples": 4,
        "tokens": 159,
        "supervised_tokens": 57,
        "truncated_share": 1 / 3,
        "samples_by_length": {"1-128": 3, "129-256": 1},
    }
    table = dict(line.rsplit(maxsplit=1) for line in format_report(report).splitlines())
    assert (
        table["  dropped: refused by the chat template"] == table["    turns must alternate"] == "2"
        and table["share truncated"] == "33.33%"
    )


def test_reasons_of_refusals_are_bounded() -> None:
    tally = Tally()
    for number in range(1000):
        tally.count(Outcome([], Dropped.REFUSED, f"no room for {number}"))
    assert len(tally.refusals) == 21 and tally.refusals["for other reasons"] == 980


def test_a_render_that_rewrites_answers_needs_exact_ids() -> None:
    tally = Tally()
    tally.count(Outcome([], Dropped.NO_ANSWER))
    assert "launch.regenerate" not in format_report(tally.as_json())
    tally.count(check_all(Outcome([], Dropped.REWRITTEN), LIMITS))
    assert "only rows with exact ids can serve (launch.regenerate)" in format_report(tally.as_json())


def test_a_refusal_keeps_its_reason() -> None:
    refused = Outcome([], Dropped.REFUSED, "turns must alternate")
    assert check_all(refused.of_category("code"), LIMITS) == refused


def test_lengths_are_counted_by_bucket() -> None:
    lengths = np.array([1, 128, 129, 256, 257, 40000], np.int32)
    counts = {name: count for name, count in histogram(lengths).items() if count}
    assert counts == {"1-128": 2, "129-256": 2, "257-512": 1, "32769-": 1}
    assert histogram(lengths[:0]) == {}


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
