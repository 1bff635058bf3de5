"""Loss masks from token differences: an answer is what a render with it has more than one that stops before it.

For the answer at message t two renders are compared:

    history    messages before t, and the generation prompt     <- what the target was given
    answered   messages up to t                                 <- the same and what it said

So what a template puts into the generation prompt is not supervised, and text that quotes its markers is only text.
Where a template renders earlier answers differently once others follow (thinking models), one row cannot show them
all as they were served: the conversation becomes one row per answer.
"""

from typing import Any, NamedTuple

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from common.data.arrow_file import Sample
from launch.data.chat import render
from launch.data.conversations import Conversation, Message
from launch.data.rules import Changed, Dropped, Outcome

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)


class _Answer(NamedTuple):
    """One rendered answer: ids up to its end, and where it starts."""

    ids: list[int]
    start: int


class Masker:
    """Renders conversations with one tokenizer and template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: set[int], settings: dict[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._end_ids = end_ids
        self._special_ids = {token for token, added in tokenizer.added_tokens_decoder.items() if added.special}
        self._settings = settings

    def mask(self, conversation: Conversation) -> Outcome:
        """The samples of a conversation, or the rule that drops it."""
        messages = conversation.messages
        turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        learnt = [turn for turn in turns if messages[turn].get("weight") != 0]
        spoken = [turn for turn in learnt if _says_something(messages[turn])]
        if not spoken:
            return Outcome([], Dropped.NOT_SUPERVISED)
        cut = None if conversation.finished else turns[-1]
        try:
            answers = [self._render(conversation, turn, taught_to_stop=turn != cut) for turn in spoken]
        except TEMPLATE_ERRORS:
            return Outcome([], Dropped.REFUSED)
        kept = [answer for answer in answers if answer is not None]
        if not kept:
            return Outcome([], Dropped.REWRITTEN)
        samples = _to_samples(kept)
        changes = {
            Changed.SOME_TURNS: len(kept) < len(answers),
            Changed.PER_TURN: len(samples) > 1,
            Changed.UNFINISHED: cut in spoken,
            Changed.EMPTY_ANSWER: len(spoken) < len(learnt),
        }
        return Outcome(samples, next((change for change, holds in changes.items() if holds), conversation.changed))

    def _render(self, conversation: Conversation, turn: int, *, taught_to_stop: bool) -> _Answer | None:
        """None where the render with the answer does not go on from the generation prompt."""
        history = self._ids(conversation, turn, generation_prompt=True)
        answered = self._ids(conversation, turn + 1, generation_prompt=False)
        if answered[: len(history)] != history:
            return None
        end = self._find_end(answered, len(history), self._end_ids) or self._find_end(answered, len(history), self._special_ids)
        if end is None:
            return _Answer(answered, len(history))
        return _Answer(answered[: end + 1 if taught_to_stop else end], len(history))

    def _ids(self, conversation: Conversation, stop: int, *, generation_prompt: bool) -> list[int]:
        return render(
            self._tokenizer,
            [_without_weight(message) for message in conversation.messages[:stop]],
            generation_prompt=generation_prompt,
            tools=conversation.tools,
            settings=self._settings,
        )

    @staticmethod
    def _find_end(ids: list[int], start: int, ends: set[int]) -> int | None:
        """The last end token: what a template adds behind it, such as a line feed, is never generated."""
        return next((place for place in range(len(ids) - 1, start - 1, -1) if ids[place] in ends), None)


def _says_something(message: Message) -> bool:
    return bool(message["content"].strip() or message.get("tool_calls") or message.get("reasoning_content"))


def _without_weight(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "weight"}


def _to_samples(answers: list[_Answer]) -> list[Sample]:
    """One sample where every answer stands unchanged in the last render, else one per answer."""
    last = answers[-1].ids
    if all(last[: len(answer.ids)] == answer.ids for answer in answers):
        return [_to_sample(last, answers)]
    return [_to_sample(answer.ids, [answer]) for answer in answers]


def _to_sample(ids: list[int], answers: list[_Answer]) -> Sample:
    loss_mask = np.zeros(len(ids), np.bool_)
    for answer in answers:
        loss_mask[answer.start : len(answer.ids)] = True
    return Sample(np.array(ids, np.int32), loss_mask)
