"""Loss masks from token differences: an answer is the part of a render with it that one before it lacks.

For the answer at message t two renders are compared:

    history    messages before t, and the generation prompt     <- the target was given this
    answered   messages up to t                                 <- this and its answer

So text that a template puts into the generation prompt is not supervised, and text that quotes its markers is only text.
Where a template renders earlier answers differently once others follow (thinking models), one row cannot show them
all as they were served: an answer that does not go on from the row before begins a row of its own.
"""

from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.arrow_file import Sample
from launch.data.chat import TEMPLATE_ERRORS, render_text
from launch.data.conversations import Conversation, Message, without_weight
from launch.data.incremental import IncrementalTokenizer
from launch.data.rules import Changed, Dropped, Outcome

_MAX_REFUSAL_CHARACTERS = 120
_CALL = {"type": "function", "function": {"name": "f", "arguments": {"x": "x"}}}


class _Answer(NamedTuple):
    """One rendered answer: ids up to its end, and where it starts."""

    ids: list[int]
    start: int


class _Row(NamedTuple):
    """Ids, and the stretches of them that are supervised."""

    ids: list[int]
    spans: list[tuple[int, int]]


class Masker:
    """Renders conversations with one tokenizer and template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: set[int], settings: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._encode = IncrementalTokenizer(tokenizer).encode
        self._end_ids = end_ids
        self._special_ids = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self._settings = settings
        self._next_turn = {calls: self._find_next_turn(calls=calls) for calls in (False, True)}

    def mask(self, conversation: Conversation) -> Outcome:
        """Return the samples of a conversation, or the rule that drops it."""
        messages = conversation.messages
        turns = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
        learnt = [turn for turn in turns if messages[turn].get("weight") != 0]
        spoken = [turn for turn in learnt if _says_something(messages[turn])]
        if not spoken:
            return Outcome([], Dropped.NOT_SUPERVISED)
        cut = None if conversation.finished else turns[-1]
        rows: list[_Row] = []
        dropped: list[Dropped] = []
        try:
            for turn in spoken:
                answer = self._render(conversation, turn, is_cut=turn == cut)
                if isinstance(answer, Dropped):
                    dropped.append(answer)
                else:
                    _add(rows, answer)
            unseen_tools = bool(rows and conversation.tools) and not self._shows_tools(conversation, spoken[0])
        except TEMPLATE_ERRORS as error:
            return Outcome([], Dropped.REFUSED, " ".join(str(error).split())[:_MAX_REFUSAL_CHARACTERS])
        if not rows:
            return Outcome([], dropped[0])
        changes = {
            Changed.UNSEEN_CALL: Dropped.UNSEEN_CALL in dropped,
            Changed.SOME_TURNS: bool(dropped),
            Changed.UNSEEN_TOOLS: unseen_tools,
            Changed.PER_TURN: len(rows) > 1,
            Changed.UNFINISHED: cut in spoken,
            Changed.EMPTY_ANSWER: len(spoken) < len(learnt),
        }
        reason = next((change for change, holds in changes.items() if holds), conversation.changed)
        return Outcome([_to_sample(row) for row in rows], reason)

    def _render(self, conversation: Conversation, turn: int, *, is_cut: bool) -> _Answer | Dropped:
        before, message, tools = conversation.messages[:turn], conversation.messages[turn], conversation.tools
        prompt = self._text(before, tools, generation_prompt=True)
        for form in (_with_open_reasoning(message), message) if is_cut else (message,):
            text = self._text([*before, form], tools)
            end_of_speech = _find_end_of_speech(form, text, len(prompt)) if is_cut else None
            if end_of_speech is not None:
                break
        if message.get("tool_calls") and not self._shows_calls(conversation, turn, text, len(prompt)):
            return Dropped.UNSEEN_CALL
        history, ids = self._encode(prompt), self._encode(text[:end_of_speech])
        if ids[: len(history)] != history:
            return Dropped.REWRITTEN
        return _Answer(ids if end_of_speech else self._end(ids, len(history), message, is_cut=is_cut), len(history))

    def _end(self, ids: list[int], start: int, message: Message, *, is_cut: bool) -> list[int]:
        """Return the ids up to the token that ends the answer: in the render, or the one that begins the next turn."""
        next_turn = self._next_turn[bool(message.get("tool_calls"))]
        end = _find_last(ids, start, self._end_ids)
        if end is None and next_turn is not None:
            return ids if is_cut else [*ids, next_turn]
        if end is None:
            end = _find_last(ids, start, self._special_ids)
        return ids if end is None else ids[: end if is_cut else end + 1]

    def _find_next_turn(self, *, calls: bool) -> int | None:
        """Return the token that begins the turn after an answer, where it is one that ends answers: GLM's <|user|>."""
        answer: Message = {"role": "assistant", "content": "x"} | ({"tool_calls": [_CALL]} if calls else {})
        messages = [{"role": "user", "content": "x"}, answer, {"role": "tool" if calls else "user", "content": "x"}]
        try:
            answered, replied = self._encode(self._text(messages[:2])), self._encode(self._text(messages))
        except TEMPLATE_ERRORS:
            return None
        follows = replied[len(answered) : len(answered) + 1] if replied[: len(answered)] == answered else []
        return next((token for token in follows if token in self._end_ids), None)

    def _shows_calls(self, conversation: Conversation, turn: int, text: str, start: int) -> bool:
        """Return True where the calls are in the render; it is compared with one without them only where names do not tell."""
        message = conversation.messages[turn]
        names = [call["function"]["name"] for call in message["tool_calls"]]
        if not all(name in text[start:] for name in names):
            return False
        words = message["content"] + (message.get("reasoning_content") or "")
        if not any(name in words for name in names):
            return True
        without = {key: value for key, value in message.items() if key != "tool_calls"}
        try:
            return self._text([*conversation.messages[:turn], without], conversation.tools) != text
        except TEMPLATE_ERRORS:
            return True  # the template refuses a turn without text and without calls, so it read the calls

    def _shows_tools(self, conversation: Conversation, turn: int) -> bool:
        history = conversation.messages[:turn]
        given, none = (self._text(history, tools, generation_prompt=True) for tools in (conversation.tools, None))
        return given != none

    def _text(self, messages: list[Message], tools: list[Any] | None = None, *, generation_prompt: bool = False) -> str:
        messages = [without_weight(message) for message in messages]
        return render_text(self._tokenizer, messages, generation_prompt=generation_prompt, tools=tools, settings=self._settings)


def _find_last(ids: list[int], start: int, ends: set[int]) -> int | None:
    """Return the index of the last end token: text that a template adds behind it, such as a line feed, is not generated."""
    return next((index for index in range(len(ids) - 1, start - 1, -1) if ids[index] in ends), None)


def _with_open_reasoning(message: Message) -> Message:
    """Return an answer cut within a <think> block of its text as one with reasoning: a template closes an empty block first."""
    lead, _, reasoning = message["content"].partition("<think>")
    if lead.strip() or not reasoning.strip() or "</think>" in reasoning or message.get("reasoning_content"):
        return message
    return message | {"content": "", "reasoning_content": reasoning.removeprefix("\n")}


def _find_end_of_speech(message: Message, text: str, start: int) -> int | None:
    """Return where the last words of an answer end in its render; None where they do not stand there as they are."""
    if message.get("tool_calls"):
        return None
    words = message["content"] if message["content"].strip() else message.get("reasoning_content") or ""
    found = ((text.rfind(part, start), part) for part in (words, words.strip()))
    return next((index + len(part) for index, part in found if index >= 0), None)


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _add(rows: list[_Row], answer: _Answer) -> None:
    """Let an answer go on from the last row, or begin a row."""
    ids, start = answer
    goes_on = bool(rows) and ids[: len(rows[-1].ids)] == rows[-1].ids
    spans = rows.pop().spans if goes_on else []
    rows.append(_Row(ids, [*spans, (start, len(ids))]))


def _to_sample(row: _Row) -> Sample:
    loss_mask = np.zeros(len(row.ids), np.bool_)
    for start, stop in row.spans:
        loss_mask[start:stop] = True
    return Sample(np.array(row.ids, np.int32), loss_mask)
