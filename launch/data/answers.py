"""Hold conversations with the target, and keep the rows in a file: after any stop the same command goes on."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from launch.data.conversations import Message, without_weight
from launch.data.prompts import Script

Row = dict[str, Any]


class Answer(NamedTuple):
    """An answer of the target: as a message, and as exact ids where they are known, the end token included."""

    message: Message
    finished: bool  # ended by itself, not by a limit
    prompt_ids: list[int] | None = None
    ids: list[int] | None = None


class History(NamedTuple):
    """The messages and tools that the target is given."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None


def hold(script: Script) -> Generator[History, Answer, Row]:
    """Yield for one answer after the other, each to the answers before it; return the row to be written.

    An answer that was cut or that calls a tool ends the conversation: nothing is built upon it.
    """
    messages: list[Message] = []
    answers: list[Answer] = []
    for turn in script.turns:
        if turn is not None:
            messages.append(turn)
            continue
        answer = yield History([without_weight(message) for message in messages], script.tools)
        messages.append(answer.message)
        answers.append(answer)
        if not answer.finished or answer.message.get("tool_calls"):
            break
    row: Row = {"category": script.category} if script.category else {}
    row["messages"] = messages
    if script.tools:
        row["tools"] = script.tools
    ids = [{"prompt_ids": answer.prompt_ids, "answer_ids": answer.ids} for answer in answers]
    if all(answer.prompt_ids and answer.ids for answer in answers):
        row |= ids[0] if len(ids) == 1 else {"answers": ids}
    return row | {"finished": answers[-1].finished}


def key_of(script: Script, settings: dict[str, Any]) -> str:
    """Return the SHA-256 of a script and the settings that decide its answers."""
    content = [script.turns, script.tools, settings] + ([script.category] if script.category else [])
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class AnswerFile:
    """JSON lines with a `key` each, appended as they come, put in order at the end.

    Rows are appended to <out>.partial; <out> is written in one piece. Rows of both are found again by their key;
    only keys and offsets are kept in memory.
    """

    def __init__(self, out: Path) -> None:
        self._out = out
        self._partial = out.with_name(f"{out.name}.partial")
        out.parent.mkdir(parents=True, exist_ok=True)
        self._offsets: dict[str, tuple[Path, int]] = {}  # key -> file and offset
        for path in (out, self._partial):
            if path.is_file():
                self._find_rows(path)
        self._file: BinaryIO = self._partial.open("ab")

    def __contains__(self, key: str) -> bool:
        return key in self._offsets

    def add(self, key: str, row: Row) -> None:
        """Append a row and flush it."""
        self._offsets[key] = self._partial, self._file.seek(0, os.SEEK_END)
        self._file.write(_encode({"key": key, **row}) + b"\n")
        self._file.flush()

    def finish(self, keys: Iterable[str]) -> Counter[str]:
        """Write the rows of these keys in this order, as far as they are there; count rows, finished, with_ids, tokens."""
        self.close()
        aside = self._out.with_name(f".{self._out.name}.new")
        counts: Counter[str] = Counter()
        with aside.open("wb") as sink:
            for key in (key for key in keys if key in self._offsets):
                line = self._read_line(key)
                sink.write(line)
                row = json.loads(line)
                sizes = [len(part["answer_ids"]) for part in row.get("answers", [row]) if "answer_ids" in part]
                counts.update(rows=1, finished=int(row["finished"]), with_ids=int(bool(sizes)), tokens=sum(sizes))
            sink.flush()
            os.fsync(sink.fileno())
        aside.replace(self._out)
        self._partial.unlink()
        return counts

    def close(self) -> None:
        """Close <out>.partial and keep it for the next time."""
        self._file.close()

    def _read_line(self, key: str) -> bytes:
        path, offset = self._offsets[key]
        with path.open("rb") as file:
            file.seek(offset)
            return file.readline()

    def _find_rows(self, path: Path) -> None:
        """Index the rows of a file; a last line that a kill cut short is cut off."""
        offset = 0
        with path.open("rb") as file:
            for line in file:
                try:
                    key = json.loads(line)["key"] if line.endswith(b"\n") else None
                except (ValueError, KeyError, TypeError):
                    key = None
                if isinstance(key, str):
                    self._offsets[key] = (path, offset)
                elif not line.endswith(b"\n") and path == self._partial:
                    os.truncate(path, offset)
                offset += len(line)


def _encode(row: Row) -> bytes:
    """Return JSON that a person can read; escaped where a server sent half of a character."""
    try:
        return json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(row).encode()
