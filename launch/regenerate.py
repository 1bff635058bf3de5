"""Answers prompts with the target itself: the text that a drafter has to learn.

    python -m launch.regenerate --model DIR --prompts human-eval --out conversations.jsonl
    python -m launch.regenerate --server http://localhost:8000/v1 --server-model NAME --prompts data.jsonl --out out.jsonl

In this process with transformers, greedily; or by a server that speaks the OpenAI protocol. Each line written holds
`messages`, `finished` (whether the last answer ended by itself) and, where they are known, the exact `prompt_ids` and
`answer_ids`, or one pair per answer in `answers`. The same command goes on where it was stopped.

On a GPU take batches of hundreds: `--device cuda:0 --batch-size 768`. Memory does not grow with the number of prompts,
but for the key and the place of every answer (350 bytes).
"""

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from launch.arguments import parse_device, run_command
from launch.data.answers import Answer, AnswerFile, History, Row, Written, hold, key_of
from launch.data.chat import TEMPLATE_ERRORS, load_tokenizer, render
from launch.data.completions import RefusedError, Server
from launch.data.generator import Generator as Target
from launch.data.prompts import Script, read_scripts
from launch.prepare import parse_setting

WINDOW_BATCHES = 64  # that are sorted together: what is in memory, however many there are

Result = tuple[str, Row | RefusedError]  # of a key
Begun = tuple[str, Generator[History, Answer, Row], list[int]]  # a conversation, and the ids that it waits to be answered


def answer_by_server(server: Server, scripts: Iterable[tuple[str, Script]], num_requests: int) -> Iterator[Result]:
    """Conversations as they end, `num_requests` at a time. ServerError where the server does not answer."""
    with ThreadPoolExecutor(num_requests) as executor:
        waiting = iter(scripts)
        running: dict[Future[Row | RefusedError], str] = {}
        try:
            while True:
                for key, script in islice(waiting, num_requests - len(running)):
                    running[executor.submit(_hold_with, server.answer, script)] = key
                if not running:
                    return
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    yield running.pop(future), future.result()
        finally:
            executor.shutdown(wait=False, cancel_futures=True)


def _hold_with(answer: Callable[[History], Answer], script: Script) -> Row | RefusedError:
    conversation = hold(script)
    try:
        history = next(conversation)
        while True:
            history = conversation.send(answer(history))
    except StopIteration as end:
        row: Row = end.value
        return row
    except RefusedError as error:
        return error


class Batches:
    """Answers in this process: batches of conversations of like length, always the same ones.

    Conversations are taken from their source window by window, and sorted by length within one.
    """

    def __init__(self, load: Callable[[], Target], tokenizer: PreTrainedTokenizerBase, batch_size: int) -> None:
        self._load = load
        self._tokenizer = tokenizer
        self._batch_size = batch_size

    def answer(self, scripts: Iterable[tuple[str, Script]], done: AnswerFile) -> Iterator[Result]:
        """Batch by batch; one that was answered as a whole before is left out."""
        waiting = iter(scripts)
        target: Target | None = None
        while window := list(islice(waiting, WINDOW_BATCHES * self._batch_size)):
            if all(key in done for key, _ in window):
                continue
            begun, refused = self._begin(window)
            yield from refused
            for start in range(0, len(begun), self._batch_size):
                batch = begun[start : start + self._batch_size]
                if any(key not in done for key, _, _ in batch):
                    target = target or self._load()
                    yield from self._hold(target, batch)

    def _begin(self, scripts: list[tuple[str, Script]]) -> tuple[list[Begun], list[Result]]:
        """The first prompt of each, the shortest first; and what the chat template refuses."""
        begun: list[Begun] = []
        refused: list[Result] = []
        for key, script in scripts:
            conversation = hold(script)
            history = next(conversation)
            try:
                begun.append((key, conversation, self._render(history)))
            except RefusedError as error:
                refused.append((key, error))
        return sorted(begun, key=lambda item: len(item[2])), refused

    def _hold(self, target: Target, batch: list[Begun]) -> Iterator[Result]:
        """All conversations of a batch to their ends, turn by turn."""
        while batch:
            answers = target.answer([prompt_ids for _, _, prompt_ids in batch])
            going_on = []
            for (key, conversation, prompt_ids), (ids, finished) in zip(batch, answers, strict=True):
                text = self._tokenizer.decode(ids, skip_special_tokens=True)
                answer = Answer({"role": "assistant", "content": text}, finished, prompt_ids, ids)
                try:
                    going_on.append((key, conversation, self._render(conversation.send(answer))))
                except StopIteration as end:
                    yield key, end.value
                except RefusedError as error:
                    yield key, error
            batch = going_on

    def _render(self, history: History) -> list[int]:
        try:
            return render(self._tokenizer, history.messages, generation_prompt=True, tools=history.tools)
        except TEMPLATE_ERRORS as error:
            raise RefusedError(str(error)) from error


def regenerate(arguments: argparse.Namespace) -> str:
    """Answer everything, write the file; returns what a person wants to know.

    The prompts are read three times over rather than kept: to count them, to answer them, to put the answers in order.

    Raises:
        HeadraceError: bad prompts, no model, or a server that does not answer; what is there is kept.
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
            for key, result in _answer(arguments, scripts(Counter()), file):
                if isinstance(result, RefusedError):
                    refused[str(result)] += 1
                elif key not in file:
                    file.add(key, result)
                    progress.update()
    finally:
        file.close()
    return _summarize(arguments.out, file.finish(key for key, _ in scripts(Counter())), refused)


def _answer(arguments: argparse.Namespace, scripts: Iterator[tuple[str, Script]], file: AnswerFile) -> Iterator[Result]:
    if arguments.server:
        still_open = ((key, script) for key, script in scripts if key not in file)
        return answer_by_server(_make_server(arguments), still_open, arguments.concurrency)
    torch.set_num_threads(arguments.threads)
    folder = arguments.model.expanduser()
    tokenizer = load_tokenizer(folder)
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    load = partial(Target, folder, tokenizer, arguments.device, arguments.max_new_tokens, dtype)
    return Batches(load, tokenizer, arguments.batch_size).answer(scripts, file)


def _make_server(arguments: argparse.Namespace) -> Server:
    key = arguments.api_key_file.read_text().strip() if arguments.api_key_file else ""
    request = {"temperature": 0, **dict(arguments.request_set)}
    limits = {"max_retries": arguments.retries, "timeout_s": arguments.timeout}
    return Server(arguments.server, arguments.server_model, arguments.max_new_tokens, request, key, **limits)


def _summarize(out: Path, written: Written, refused: Counter[str]) -> str:
    num_rows, num_finished, num_with_ids, num_tokens = written
    lines = [f"{out}: {num_rows:,} conversations, {num_with_ids:,} with exact ids ({num_tokens:,} tokens)"]
    lines += [f"{num_finished:,} finished, {num_rows - num_finished:,} cut at the limit (not taught to stop)"]
    lines += [f"left out {count:,}: {reason}" for reason, count in refused.most_common()]
    return "\n".join(lines)


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"needed at least 1, found {text}")
    return int(text)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--prompts", required=True, metavar="PATH|human-eval", help="conversations to answer, see launch/data/prompts.py")
    add("--out", type=Path, required=True, metavar="FILE.jsonl")
    add(
        "--max-new-tokens",
        type=_positive,
        metavar="N",
        help="default: 8192 with the prompt, or the server's own limit",
    )
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
