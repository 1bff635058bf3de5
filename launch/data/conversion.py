"""Rows to samples, in this process or in several: the outcomes come in the order of the rows, whatever their number."""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import HeadraceError
from launch.data.chat import end_ids, load_tokenizer
from launch.data.conversations import ALIASES, read_row
from launch.data.inputs import Chunk
from launch.data.masking import Masker
from launch.data.rules import Limits, Outcome, check_all

_CHUNKS_PER_WORKER = 3  # on their way at once: what bounds the memory


class Settings(NamedTuple):
    """What decides how a row is converted; sent to every worker."""

    model: Path
    template: Path | None
    template_settings: dict[str, Any]
    limits: Limits
    assistant_roles: list[str]  # names of the assistant beside the known ones


class Converter:
    """One row at a time."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._aliases = ALIASES | {name.lower(): "assistant" for name in settings.assistant_roles}
        self._limits = settings.limits

    @cached_property
    def _masker(self) -> Masker:
        """Load the tokenizer when the first row has to be rendered: rows of token ids need none."""
        model, template, template_settings = self._settings[:3]
        tokenizer = load_tokenizer(model, template)
        return Masker(tokenizer, end_ids(model, tokenizer), template_settings)

    def convert(self, raw: object) -> Outcome:
        """A line of JSON or an object to its samples, or to the rule that drops it."""
        read = read_row(raw, self._aliases)
        outcome = read if isinstance(read, Outcome) else self._masker.mask(read).of_category(read.category)
        return check_all(outcome, self._limits)


class Converted(NamedTuple):
    """The outcomes of a chunk."""

    outcomes: list[Outcome]
    num_bytes: int


class Workers:
    """Converts chunks; with 1 worker in this process, else in as many spawned ones."""

    def __init__(self, settings: Settings, num_workers: int) -> None:
        self._converter = Converter(settings) if num_workers == 1 else None
        self._executor: ProcessPoolExecutor | None = None
        if num_workers > 1:
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(num_workers, context, _start_worker, (settings,))
        self._window = num_workers * _CHUNKS_PER_WORKER

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)

    def convert(self, chunks: Iterable[Chunk]) -> Iterator[Converted]:
        """The outcomes of all chunks, in their order.

        Raises:
            HeadraceError: a worker was killed, such as for its memory.
        """
        if self._converter is not None:
            for chunk in chunks:
                yield Converted([self._converter.convert(row) for row in chunk.rows], chunk.num_bytes)
            return
        assert self._executor is not None
        waiting: deque[Future[Converted]] = deque()
        try:
            for chunk in chunks:
                waiting.append(self._executor.submit(_convert, chunk))
                if len(waiting) == self._window:
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
    return Converted([_worker[0].convert(row) for row in chunk.rows], chunk.num_bytes)
