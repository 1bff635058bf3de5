"""Conversations to decode, each with a category: held-out samples, files of prompts, or one typed message."""

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from common.config import Config
from common.data.held_out import HeldOut
from common.errors import DataError
from launch.data.chat import render
from launch.data.conversations import Message
from launch.data.prompts import Script, read_scripts

Settings = Mapping[str, Any]  # variables of a chat template
Turns = Generator[list[int], list[int], None]  # gives the prompt of each turn, takes the answer to it


class Case(NamedTuple):
    """A conversation to hold."""

    name: str
    category: str
    turns: Turns


def typed_case(tokenizer: PreTrainedTokenizerBase, text: str, settings: Settings | None = None) -> Case:
    """Return a user's message as a case."""
    script = Script([{"role": "user", "content": text}, None])
    return Case(f'prompt "{text}"', "typed", _hold(script, tokenizer, settings))


def file_cases(
    sources: Sequence[str], tokenizer: PreTrainedTokenizerBase, unusable: Counter[str], settings: Settings | None = None
) -> list[Case]:
    """Return the conversations of files (see launch/data/prompts.py); the category of a row defaults to its file's name.

    Raises:
        DataError: no such file, or nothing in it to answer.
    """
    return [
        Case(f"{Path(source).name} {number}", script.category or Path(source).stem, _hold(script, tokenizer, settings))
        for source in sources
        for number, script in enumerate(read_scripts(source, None, unusable))
    ]


def held_out_cases(config: Config, num_each: int) -> list[Case]:
    """Return the tokens before the first supervised one of held-out samples, at least one token each.

    The category is the evaluation set, or set/category where samples name one; each gets `num_each` cases.

    Raises:
        DataError: the run has no evaluation set, or one is unreadable.
    """
    if not config.data.eval_sets:
        raise DataError("data.eval_path: needed an evaluation data set, found none; give --prompt or --prompts")
    held_out = HeldOut.open(config.data)
    categories = ["/".join(filter(None, group)) for group in held_out.groups()]
    cases = []
    for number in _first_of_each(categories, num_each):
        sample = held_out.read(number)
        prompt = sample.input_ids[: max(int(sample.loss_mask.argmax()), 1)].tolist()
        cases.append(Case(f"held-out sample {number}", categories[number], _hold_one_turn(prompt)))
    return cases


def first_of_each_category(cases: Sequence[Case], num_each: int) -> list[Case]:
    """Return the first cases of every category, in their order."""
    return [cases[number] for number in _first_of_each([case.category for case in cases], num_each)]


def _hold(script: Script, tokenizer: PreTrainedTokenizerBase, settings: Settings | None) -> Turns:
    """Render turn after turn, each prompt with the answers before it."""
    messages: list[Message] = []
    for turn in script.turns:
        if turn is not None:
            messages.append({key: value for key, value in turn.items() if key != "weight"})
            continue
        answer = yield render(tokenizer, messages, generation_prompt=True, tools=script.tools, settings=dict(settings or {}))
        messages.append({"role": "assistant", "content": str(tokenizer.decode(answer, skip_special_tokens=True))})


def _hold_one_turn(prompt: list[int]) -> Turns:
    yield prompt


def _first_of_each(categories: Sequence[str], num_each: int) -> list[int]:
    seen: Counter[str] = Counter()
    first = []
    for number, category in enumerate(categories):
        seen[category] += 1
        if seen[category] <= num_each:
            first.append(number)
    return first
