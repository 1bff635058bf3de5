"""Read a row: a conversation in the form that chat templates expect, or samples that are token ids already.

    {"messages": [{"role": ..., "content": ...}, ...]}     or "conversations"; "from"/"value" for "role"/"content"
    {"input_ids": [...], "loss_mask": [...]}               used as they are
    {"prompt_ids": [...], "answer_ids": [...]}             the same, as launch.regenerate writes them
    {"answers": [{"prompt_ids": ..., "answer_ids": ...}]}  one per turn

Beside the messages, or in the system turn, may stand `tools` or `functions` (a list or its JSON); beside them `system`
(a text) and `finished` (false: the last answer was cut at a token limit); in every form a text `category`, or `task`,
or `source`, by which acceptance is told apart.
A message may carry `tool_calls`, `reasoning_content` (or `reasoning`, `thinking`), and `weight` 0 for an answer that
is not to be learnt.
"""

import json
from typing import Any, NamedTuple

import numpy as np

from common.data.arrow_file import Sample
from launch.data.rules import Changed, Dropped, Outcome

Message = dict[str, Any]

ROLES = {"system", "developer", "user", "assistant", "tool"}
ASSISTANT_NAMES = {"gpt", "chatgpt", "model", "bot", "ai", "bing", "bard"}
ALIASES = {"human": "user", "function": "tool", "observation": "tool"} | dict.fromkeys(ASSISTANT_NAMES, "assistant")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
CATEGORY_KEYS = ("category", "task", "source")


class Conversation(NamedTuple):
    """Messages and tools as a chat template takes them."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    finished: bool = True
    changed: Changed | None = None
    category: str = ""


class RuleError(Exception):
    """The row falls under a rule that drops it: the rule is the message."""


def read_row(raw: object, aliases: dict[str, str] = ALIASES) -> Conversation | Outcome:
    """Return a conversation to render, or the outcome where there is nothing to render; bytes are JSON."""
    try:
        row = parse_row(raw)
        category = read_category(row)
        if isinstance(row.get("input_ids"), list) and isinstance(row.get("loss_mask"), list):
            return Outcome([_to_sample(row["input_ids"], row["loss_mask"])]).of_category(category)
        if isinstance(row.get("prompt_ids"), list) or isinstance(row.get("answers"), list):
            return Outcome(_read_answers(row)).of_category(category)
        messages, changed = _without_leading_answers(read_messages(row, aliases))
        while messages[-1]["role"] != "assistant":
            messages.pop()  # no answer follows
        return Conversation(messages, read_tools(row), row.get("finished") is not False, changed, category)
    except RuleError as error:
        return Outcome([], Dropped(str(error)))


def parse_row(raw: object) -> dict[str, Any]:
    """Return the object that a line of JSON, or a row of a table, holds. RuleError for anything else."""
    try:
        row = json.loads(raw) if isinstance(raw, bytes) else raw
    except (ValueError, RecursionError):
        raise RuleError(Dropped.NOT_JSON) from None
    if not isinstance(row, dict):
        raise RuleError(Dropped.NO_CONVERSATION)
    return row


def read_messages(row: dict[str, Any], aliases: dict[str, str] = ALIASES) -> list[Message]:
    """Return the messages of a row, in the names and forms that templates expect. RuleError where they cannot be read."""
    turns = _read_turns(row)
    if not isinstance(turns, list):
        raise RuleError(Dropped.NO_CONVERSATION)
    if not turns:
        raise RuleError(Dropped.EMPTY)
    messages = [_read_message(turn, aliases) for turn in turns]
    if isinstance(row.get("system"), str) and row["system"] and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": row["system"]})
    _check_text(messages)
    return messages


def read_category(row: dict[str, Any]) -> str:
    """Return the kind of prompt a row is; "" for none."""
    named = next((row[key] for key in CATEGORY_KEYS if row.get(key) and isinstance(row[key], str)), "")
    return named.encode(errors="replace").decode()


def read_tools(row: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return the tools of a row, a list or its JSON, beside the messages or in the system turn; None for none.

    `functions` are the older form of them, without the wrapper that templates expect. RuleError for anything else.
    """
    turns = _read_turns(row)
    for holder in (row, *(turns if isinstance(turns, list) else ())):
        if not isinstance(holder, dict):
            continue
        tools = _read_objects(holder.get("tools"))
        if functions := _read_objects(holder.get("functions")):
            tools = tools or [tool if "function" in tool else {"type": "function", "function": tool} for tool in functions]
        if tools:
            return tools
    return None


def without_weight(message: Message) -> Message:
    """Return the message as a template or a server takes it."""
    return {key: value for key, value in message.items() if key != "weight"}


def with_text_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as JSON text."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = call["function"].get("arguments", {})
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": text}})
    return message | {"tool_calls": calls}


def _read_turns(row: dict[str, Any]) -> object:
    return _parsed(row["messages"] if row.get("messages") is not None else row.get("conversations"))


def _read_objects(value: object) -> list[dict[str, Any]]:
    value = _parsed(value)
    tools = [_parsed(tool) for tool in value] if isinstance(value, list) else value
    if tools is None or tools == "":
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RuleError(Dropped.BAD_TOOLS)
    _check_text(tools)
    return tools


def _read_answers(row: dict[str, Any]) -> list[Sample]:
    samples: list[Sample] = []
    for answer in row.get("answers") or [row]:
        match answer:
            case {"prompt_ids": list(prompt), "answer_ids": list(new)}:
                sample = _to_sample(prompt + new, [0] * len(prompt) + [1] * len(new))
            case _:
                raise RuleError(Dropped.BAD_IDS)
        if samples and prompt[: len(samples[-1].input_ids)] == samples[-1].input_ids.tolist():  # it continues that row
            before = samples.pop().loss_mask
            sample.loss_mask[: len(before)] = before
        samples.append(sample)
    return samples


def _to_sample(ids: list[Any], mask: list[Any]) -> Sample:
    whole = all(type(token) is int and -(2**31) <= token < 2**31 for token in ids)
    if not whole or len(ids) != len(mask) or not all(bit in (0, 1) for bit in mask):
        raise RuleError(Dropped.BAD_IDS)
    return Sample(np.array(ids, np.int32), np.array(mask, np.bool_))


def _read_message(turn: object, aliases: dict[str, str]) -> Message:
    if not isinstance(turn, dict):
        raise RuleError(Dropped.BAD_MESSAGE)
    turn = _without_nulls(turn)
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str):
        raise RuleError(Dropped.BAD_MESSAGE)
    role = aliases.get(role.lower(), role.lower())
    if role not in ROLES:
        raise RuleError(Dropped.UNKNOWN_ROLE)
    message: Message = {"role": role, "content": _read_content(turn, role)}
    if role == "assistant":
        message |= _read_extras(turn)
    return message | {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}


def _read_content(turn: dict[str, Any], role: str) -> str:
    match turn.get("content", turn.get("value")):
        case str(text):
            return text
        case None if role == "assistant" and (turn.get("tool_calls") or turn.get("function_call")):
            return ""  # as servers hand it to the template
        case [*parts] if parts and all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            return "".join(part["text"] for part in parts)
    raise RuleError(Dropped.BAD_MESSAGE)


def _read_extras(turn: dict[str, Any]) -> Message:
    extras: Message = {}
    reasoning = next((turn[key] for key in REASONING_KEYS if isinstance(turn.get(key), str)), None)
    if reasoning is not None:
        extras["reasoning_content"] = reasoning
    if turn.get("tool_calls"):
        extras["tool_calls"] = _read_tool_calls(turn["tool_calls"])
    elif turn.get("function_call"):  # the older form, for one call
        extras["tool_calls"] = _read_tool_calls([_parsed(turn["function_call"])])
    if turn.get("weight") is not None:
        extras["weight"] = turn["weight"]
    return extras


def _read_tool_calls(value: object) -> list[dict[str, Any]]:
    """Make objects of the arguments: servers parse them before the template sees them."""
    calls = _parsed(value)
    if not isinstance(calls, list):
        raise RuleError(Dropped.BAD_TOOL_CALLS)
    read = []
    for call in calls:
        call = _without_nulls(call) if isinstance(call, dict) else {}
        match call.get("function", call):
            case {"name": str(name), **function} if isinstance(arguments := _parsed(function.get("arguments") or {}), dict):
                named = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
                read.append(named | {"type": "function", "function": {"name": name, "arguments": arguments}})
            case _:
                raise RuleError(Dropped.BAD_TOOL_CALLS)
    return read


def _without_nulls(value: dict[str, Any]) -> dict[str, Any]:
    """Drop keys with null: writers of tables give every object all keys that any has."""
    return {key: item for key, item in value.items() if item is not None}


def _parsed(value: object) -> object:
    """Return the value that stands in a JSON text; anything else, and text that is no JSON, as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _check_text(value: object) -> None:
    """Raise RuleError for a lone surrogate: it survives JSON, but no tokenizer takes it."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise RuleError(Dropped.BAD_TEXT) from None


def _without_leading_answers(messages: list[Message]) -> tuple[list[Message], Changed | None]:
    """Drop answers before the first question: an answer to nothing is not as it was served."""
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise RuleError(Dropped.NO_ANSWER)
    first = next((index for index, role in enumerate(roles) if role in ("user", "tool")), len(roles))
    kept = [message for index, message in enumerate(messages) if index > first or message["role"] != "assistant"]
    if not any(message["role"] == "assistant" for message in kept):
        raise RuleError(Dropped.NO_QUESTION)
    return kept, Changed.LEADING_ANSWER if len(kept) < len(messages) else None
