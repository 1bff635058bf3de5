"""Convert rows to samples, in this process or in several; outcomes come in the order of the rows."""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import HeadraceError
from launch.data.chat import end_ids, load_tokenizer
from launch.data.conversations import ALIASES, read_row
from launch.data.inputs import Chunk
from launch.data.masking import Masker
from launch.data.rules import Limits, Outcome, check_all

_CHUNKS_PER_WORKER = 3  # in flight at once: the bound of the memory


class Settings(NamedTuple):
    """All that decides how a row is converted; sent to every worker."""

    model: Path
    template: Path | None
    template_settings: dict[str, Any]
    limits: Limits
    assistant_roles: list[str]  # names of the assistant beside the known ones


Converted = tuple[list[Outcome], int]  # the outcomes of a chunk, and its bytes of the file
Convert = Callable[[Iterable[Chunk]], Iterator[Converted]]


class Converter:
    """Converts chunks in this process."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._aliases = ALIASES | {name.lower(): "assistant" for name in settings.assistant_roles}

    @cached_property
    def _masker(self) -> Masker:
        """Rows of token ids need no tokenizer: it is loaded when the first row has to be rendered."""
        model, template, template_settings = self._settings[:3]
        tokenizer = load_tokenizer(model, template)
        return Masker(tokenizer, end_ids(model, tokenizer), template_settings)

    def convert(self, chunk: Chunk) -> Converted:
        """Convert every row to its samples, or to the rule that drops it."""
        return [self._convert_row(row) for row in chunk.rows], chunk.num_bytes

    def _convert_row(self, raw: object) -> Outcome:
        read = read_row(raw, self._aliases)
        outcome = read if isinstance(read, Outcome) else self._masker.mask(read).of_category(read.category)
        return check_all(outcome, self._settings.limits)


@contextmanager
def open_workers(settings: Settings, num_workers: int) -> Iterator[Convert]:
    """Give a function that converts chunks in their order; 1 worker is this process, more are spawned."""
    if num_workers == 1:
        yield partial(map, Converter(settings).convert)
        return
    context = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(num_workers, context, _start_worker, (settings,))
    try:
        yield partial(_convert_all, executor, num_workers * _CHUNKS_PER_WORKER)
    finally:
        executor.shutdown(cancel_futures=True)


def _convert_all(executor: ProcessPoolExecutor, window: int, chunks: Iterable[Chunk]) -> Iterator[Converted]:
    waiting: deque[Future[Converted]] = deque()
    try:
        for chunk in chunks:
            waiting.append(executor.submit(_convert, chunk))
            if len(waiting) == window:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise HeadraceError("--workers: a worker process was killed (out of memory?); try fewer") from error


_worker: list[Converter] = []  # of a spawned process: its converter


def _start_worker(settings: Settings) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core per worker
    _worker.append(Converter(settings))


def _convert(chunk: Chunk) -> Converted:
    return _worker[0].convert(chunk)
