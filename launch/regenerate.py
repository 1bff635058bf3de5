"""Answer prompts with the target itself: the text that a drafter has to learn.

    python -m launch.regenerate --model DIR --prompts human-eval --out conversations.jsonl
    python -m launch.regenerate --server http://localhost:8000/v1 --server-model NAME --prompts data.jsonl --out out.jsonl

In this process with transformers, greedily; or by a server that speaks the OpenAI protocol. Each line written holds
`messages`, `finished` (whether the last answer ended by itself) and, where they are known, the exact `prompt_ids` and
`answer_ids`, or one pair per answer in `answers`. The same command goes on where it was stopped.

On a GPU take batches of hundreds: `--device cuda:0 --batch-size 768`. Memory does not grow with the number of prompts,
but for the key and the offset of every answer (350 bytes).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from launch.arguments import make_parser, parse_device, run_command
from launch.data.answers import Answer, AnswerFile, History, Row, hold, key_of
from launch.data.chat import TEMPLATE_ERRORS, load_tokenizer, render
from launch.data.completions import RefusedError, Server
from launch.data.generator import Generator as Target
from launch.data.generator import NewTokens
from launch.data.prompts import Script, read_scripts
from launch.prepare import parse_setting

WINDOW_BATCHES = 64  # that are sorted together: the bound of the memory, however many there are

Held = Generator[History, Answer, Row]


class Result(NamedTuple):
    """The end of a conversation."""

    key: str
    row: Row | RefusedError


class Waiting(NamedTuple):
    """A conversation, and the ids that it waits to have answered."""

    key: str
    conversation: Held
    prompt_ids: list[int]


def answer_by_server(server: Server, scripts: Iterable[tuple[str, Script]], num_requests: int) -> Iterator[Result]:
    """Yield conversations as they end, `num_requests` at a time. ServerError where the server does not answer."""
    with ThreadPoolExecutor(num_requests) as executor:
        waiting = iter(scripts)
        running: set[Future[Result]] = set()
        try:
            while True:
                running |= {executor.submit(_hold_with, server, *item) for item in islice(waiting, num_requests - len(running))}
                if not running:
                    return
                done, running = wait(running, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _hold_with(server: Server, key: str, script: Script) -> Result:
    conversation = hold(script)
    try:
        history = next(conversation)
        while True:
            history = conversation.send(server.answer(history))
    except StopIteration as end:
        return Result(key, end.value)
    except RefusedError as error:
        return Result(key, error)


class Batches:
    """Answers in this process: batches of conversations of like length, always the same ones.

    Conversations are taken from their source window by window, and sorted by length within one.
    """

    def __init__(self, load: Callable[[], Target], tokenizer: PreTrainedTokenizerBase, batch_size: int) -> None:
        self._load = load
        self._tokenizer = tokenizer
        self._batch_size = batch_size

    def answer(self, scripts: Iterable[tuple[str, Script]], done: AnswerFile) -> Iterator[Result]:
        """Answer batch by batch; one that was answered as a whole before is left out."""
        scripts = iter(scripts)
        target: Target | None = None
        while window := list(islice(scripts, WINDOW_BATCHES * self._batch_size)):
            if all(key in done for key, _ in window):
                continue
            steps = [self._step(key, hold(script)) for key, script in window]
            yield from (step for step in steps if isinstance(step, Result))
            waiting = sorted((step for step in steps if isinstance(step, Waiting)), key=lambda step: len(step.prompt_ids))
            for start in range(0, len(waiting), self._batch_size):
                batch = waiting[start : start + self._batch_size]
                if any(step.key not in done for step in batch):
                    target = target or self._load()
                    yield from self._hold(target, batch)

    def _hold(self, target: Target, batch: list[Waiting]) -> Iterator[Result]:
        """Hold all conversations of a batch to their ends, turn by turn."""
        while batch:
            tokens = target.answer([step.prompt_ids for step in batch])
            steps = [self._step(*step[:2], self._to_answer(step, new)) for step, new in zip(batch, tokens, strict=True)]
            yield from (step for step in steps if isinstance(step, Result))
            batch = [step for step in steps if isinstance(step, Waiting)]

    def _to_answer(self, step: Waiting, new: NewTokens) -> Answer:
        text = self._tokenizer.decode(new.ids, skip_special_tokens=True)
        return Answer({"role": "assistant", "content": text}, new.finished, step.prompt_ids, new.ids)

    def _step(self, key: str, conversation: Held, answer: Answer | None = None) -> Waiting | Result:
        """Begin a conversation, or give it its answer; return the next prompt, or its end."""
        try:
            history = next(conversation) if answer is None else conversation.send(answer)
            ids = render(self._tokenizer, history.messages, generation_prompt=True, tools=history.tools)
            return Waiting(key, conversation, ids)
        except StopIteration as end:
            return Result(key, end.value)
        except TEMPLATE_ERRORS as error:
            return Result(key, RefusedError(str(error)))


def regenerate(arguments: argparse.Namespace) -> str:
    """Answer everything, write the file; return its summary.

    The prompts are read three times over rather than kept: to count them, to answer them, to put the answers in order.
    HeadraceError for bad prompts, no model, or a server that does not answer; the answers so far are kept.
    """
    settings = {"max_new_tokens": arguments.max_new_tokens, **dict(arguments.request_set)}
    if arguments.dtype:
        settings["dtype"] = arguments.dtype
    settings["model"] = arguments.server_model if arguments.server else str(arguments.model.expanduser().absolute())

    def scripts(unusable: Counter[str]) -> Iterator[tuple[str, Script]]:
        for script in read_scripts(arguments.prompts, arguments.limit, unusable):
            yield key_of(script, settings), script

    refused: Counter[str] = Counter()
    file = AnswerFile(arguments.out)
    try:
        is_done = [key in file for key, _ in scripts(refused)]
        with tqdm(total=len(is_done), initial=sum(is_done), unit="conversation") as progress:
            for key, row in _answer(arguments, scripts(Counter()), file):
                if isinstance(row, RefusedError):
                    refused[str(row)] += 1
                elif key not in file:
                    file.add(key, row)
                    progress.update()
    finally:
        file.close()
    counts = file.finish(key for key, _ in scripts(Counter()))
    with_ids = f"{counts['with_ids']:,} with exact ids ({counts['tokens']:,} tokens)"
    lines = [f"{arguments.out}: {counts['rows']:,} conversations, {with_ids}"]
    lines += [f"{counts['finished']:,} finished, {counts['rows'] - counts['finished']:,} cut at the limit (not taught to stop)"]
    lines += [f"left out {count:,}: {reason}" for reason, count in refused.most_common()]
    return "\n".join(lines)


def _answer(arguments: argparse.Namespace, scripts: Iterator[tuple[str, Script]], file: AnswerFile) -> Iterator[Result]:
    if arguments.server:
        api_key = arguments.api_key_file.read_text().strip() if arguments.api_key_file else ""
        request = {"temperature": 0, **dict(arguments.request_set)}
        where, limits = (arguments.server, arguments.server_model), (arguments.retries, arguments.timeout)
        server = Server(*where, arguments.max_new_tokens, request, api_key, *limits)
        return answer_by_server(server, (item for item in scripts if item[0] not in file), arguments.concurrency)
    torch.set_num_threads(arguments.threads)
    folder = arguments.model.expanduser()
    tokenizer = load_tokenizer(folder)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    load = partial(Target, folder, tokenizer, arguments.device, arguments.max_new_tokens, dtype)
    return Batches(load, tokenizer, arguments.batch_size).answer(scripts, file)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"needed at least 1, found {text}")
    return int(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("regenerate", __doc__)
    add = parser.add_argument
    add("--prompts", required=True, metavar="PATH|human-eval", help="conversations to answer, see launch/data/prompts.py")
    add("--out", type=Path, required=True, metavar="FILE.jsonl")
    add("--max-new-tokens", type=_positive, metavar="N", help="default: 8192 with the prompt, or the server's own limit")
    add("--limit", type=int, metavar="N", help="only the first N prompts")
    add("--model", type=Path, metavar="DIR", help="answer in this process")
    add("--batch-size", type=int, default=32)
    add("--device", type=parse_device, default=torch.device("cpu"), help="such as cuda:0 (default: %(default)s)")
    add("--dtype", choices=["float32", "bfloat16"], help="of the model (default: that of its files)")
    add("--threads", type=int, default=2, help="of the CPU (default: %(default)s)")
    add("--server", metavar="URL", help="answer by a server instead, such as http://localhost:8000/v1")
    add("--server-model", metavar="NAME", help="as the server calls it")
    add("--concurrency", type=int, default=64, help="requests at a time (default: %(default)s)")
    add("--retries", type=int, default=5, help="of a request (default: %(default)s)")
    add("--timeout", type=float, default=600.0, metavar="S", help="of a request (default: %(default)s)")
    add("--api-key-file", type=Path, metavar="FILE")
    add("--request-set", type=parse_setting, action="append", default=[], metavar="KEY=VALUE", help="fields of a request")
    arguments = parser.parse_args(argv)
    if (arguments.model is None) == (arguments.server is None):
        parser.error("needed either --model or --server")
    if (arguments.server is None) != (arguments.server_model is None):
        parser.error("--server and --server-model go together")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Read the command line and answer the prompts."""
    return run_command(lambda arguments: print(regenerate(arguments)), parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
