"""Conversations to prepared data sets: token ids, and a mask of what the assistant said.

    python -m launch.prepare --model DIR --input conversations.jsonl --out DIR --eval-out DIR --eval-samples 24

The last rows kept are held out. A row with `prompt_ids` and `answer_ids` (see launch.regenerate) is used as it is;
others are rendered with the target's chat template, and every assistant turn is supervised.
"""

import argparse
import hashlib
import sys
from collections import Counter, deque
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import numpy.typing as npt
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from common.arrow_file import Sample
from common.dataset import DatasetWriter
from common.errors import DataError, HeadraceError
from common.target_shape import read_target_shape
from launch.chat import load_tokenizer, render
from launch.prompts import Message, read_json_lines


class Dropped(StrEnum):
    """Why a row cannot be used."""

    MALFORMED = "needs messages with role and content, or ids"
    NO_ANSWER = "no assistant turn"
    REFUSED = "refused by the chat template"
    REWRITTEN = "the chat template rewrites earlier turns"
    TOO_LONG = "longer than --max-length"
    NOT_SUPERVISED = "no two supervised tokens in a row"
    UNKNOWN_ID = "id outside the vocabulary"
    DUPLICATE = "duplicate"


class Preparation:
    """Turns rows into samples and counts what it drops."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, max_length: int) -> None:
        self.num_kept = 0
        self.dropped: Counter[Dropped] = Counter()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._seen: set[bytes] = set()

    def read(self, path: Path) -> Iterator[Sample]:
        """The usable rows of a JSON lines file, in its order. DataError for a file that is not one."""
        for _, row in tqdm(read_json_lines(path), unit="row", desc="preparing"):
            sample = self._convert(row)
            if isinstance(sample, Dropped):
                self.dropped[sample] += 1
            else:
                self.num_kept += 1
                yield sample

    def _convert(self, row: dict[str, Any]) -> Sample | Dropped:
        sample = tokenize(self._tokenizer, row)
        if isinstance(sample, Dropped):
            return sample
        input_ids, loss_mask = sample
        if len(input_ids) > self._max_length:
            return Dropped.TOO_LONG
        if not (loss_mask[:-1] & loss_mask[1:]).any():
            return Dropped.NOT_SUPERVISED
        if input_ids.min() < 0 or input_ids.max() >= self._vocab_size:
            return Dropped.UNKNOWN_ID
        digest = hashlib.sha256(input_ids.tobytes()).digest()
        if digest in self._seen:
            return Dropped.DUPLICATE
        self._seen.add(digest)
        return sample


def tokenize(tokenizer: PreTrainedTokenizerBase, row: dict[str, Any]) -> Sample | Dropped:
    """One conversation as a sample: exact ids where the row carries them, else rendered from its messages."""
    match row:
        case {"prompt_ids": [*prompt_ids], "answer_ids": [*answer_ids]}:
            if all(isinstance(token, int) for token in prompt_ids + answer_ids):
                return _to_sample(prompt_ids + answer_ids, [(len(prompt_ids), len(prompt_ids) + len(answer_ids))])
        case {"messages": [*messages]}:
            if all(map(_is_message, messages)):
                return _tokenize_messages(tokenizer, messages)
    return Dropped.MALFORMED


def _is_message(message: object) -> bool:
    match message:
        case {"role": str(), "content": str()}:
            return True
    return False


def _tokenize_messages(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> Sample | Dropped:
    """An answer is what a render with it has more than a render that stops where it starts."""
    turns = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        return Dropped.NO_ANSWER
    try:
        ids = render(tokenizer, messages[: turns[-1] + 1], generation_prompt=False)
        spans = []
        for turn in turns:
            history = render(tokenizer, messages[:turn], generation_prompt=True)
            answered = render(tokenizer, messages[: turn + 1], generation_prompt=False)
            if answered[: len(history)] != history or ids[: len(answered)] != answered:
                return Dropped.REWRITTEN
            spans.append((len(history), _end_of_answer(answered, len(history), tokenizer.eos_token_id)))
    except jinja2.TemplateError:
        return Dropped.REFUSED
    return _to_sample(ids, spans)


def _end_of_answer(ids: list[int], start: int, end_id: int | None) -> int:
    """Just after the end token: a template may add text, such as a line feed, that the target never generates."""
    for place in range(len(ids) - 1, start - 1, -1):
        if ids[place] == end_id:
            return place + 1
    return len(ids)


def _to_sample(ids: list[int], spans: list[tuple[int, int]]) -> Sample:
    loss_mask: npt.NDArray[np.bool_] = np.zeros(len(ids), np.bool_)
    for start, end in spans:
        loss_mask[start:end] = True
    return Sample(np.array(ids, np.int64).astype(np.int32), loss_mask)


def prepare(preparation: Preparation, arguments: argparse.Namespace) -> None:
    """Write both data sets; each appears complete or not at all.

    Raises:
        DataError: a folder exists already, the input is unreadable, or no row is left for training.
    """
    num_held_out, source = arguments.eval_samples, {"made_by": "launch.prepare", "input": str(arguments.input)}
    if num_held_out and arguments.eval_out.exists():
        raise DataError(f"{arguments.eval_out}: needed a new folder, found one that exists")
    held_out: deque[Sample] = deque()
    with DatasetWriter(arguments.out, source | {"split": "train"}) as writer:
        for sample in preparation.read(arguments.input):
            held_out.append(sample)
            if len(held_out) > num_held_out:
                writer.add(*held_out.popleft())
        if preparation.num_kept <= num_held_out:
            kept = preparation.num_kept
            raise DataError(f"{arguments.input}: needed at least {num_held_out + 1} usable rows, found {kept}")
    if held_out:
        with DatasetWriter(arguments.eval_out, source | {"split": "eval"}) as writer:
            for sample in held_out:
                writer.add(*sample)


def format_table(preparation: Preparation, num_held_out: int) -> str:
    """What became of the rows read, one line each."""
    num_held_out = min(num_held_out, preparation.num_kept)
    lines = [("for training", preparation.num_kept - num_held_out), ("held out", num_held_out)]
    lines += [(f"dropped: {reason}", count) for reason, count in preparation.dropped.most_common()]
    return "\n".join(f"{name:<60}{count:>10,}" for name, count in lines)


def main() -> int:
    """Exit code 0, or 1 after one line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="the target: its tokenizer is used")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--eval-out", type=Path, metavar="DIR")
    parser.add_argument("--eval-samples", type=int, default=0, metavar="N", help="the last N rows kept are held out")
    parser.add_argument("--max-length", type=int, default=8192, metavar="L", help="longer rows are dropped")
    arguments = parser.parse_args()
    if (arguments.eval_out is not None) != (arguments.eval_samples > 0):
        parser.error("--eval-out and --eval-samples go together")
    try:
        folder = arguments.model.expanduser()
        preparation = Preparation(load_tokenizer(folder), read_target_shape(folder).vocab_size, arguments.max_length)
        try:
            prepare(preparation, arguments)
        finally:
            print(format_table(preparation, arguments.eval_samples), flush=True)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
