"""Conversations to prepared data sets: token ids, and a mask of what the assistant said.

    python -m launch.prepare --model DIR --input conversations.jsonl --out DIR --eval-out DIR --eval-samples 24

Files: JSON lines, JSON, Parquet, Arrow, plain or gzip, folders of these, folders of Hugging Face datasets; see
launch/data/conversations.py for what a row may hold. The last rows kept of each data set are held out, in equal shares.
The same command again does nothing while nothing changed; else it says what did, and makes both sets anew.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

from common.data.arrow_file import Sample
from common.data.dataset import Dataset, DatasetWriter
from common.errors import DataError, HeadraceError
from common.target_shape import read_vocab_size
from launch.data.conversion import Converter, Settings, Workers
from launch.data.fingerprints import describe_inputs, describe_rules, describe_tokenizer, differences
from launch.data.inputs import Input, find_files, parse_input, read_chunks
from launch.data.rules import Limits, Tally, format_report
from launch.data.selection import Duplicates, Selection, share_out
from launch.data.vocabulary import fingerprint_vocabulary

_BYTES_PER_WORKER = 16 << 20  # a worker costs seconds to start


class Preparation:
    """Reads every input once, writes the samples for training, keeps those held out."""

    def __init__(self, workers: Workers, sources: list[Input], num_held_out: int) -> None:
        self.tally = Tally()
        self.held_out: list[Sample] = []
        self.rows_per_input: list[dict[str, Any]] = []
        self._workers = workers
        self._sources = sources
        self._shares = share_out(num_held_out, len(sources))
        self._duplicates = Duplicates()

    def read(self) -> Iterator[Sample]:
        """The samples for training, in the order of the inputs and their rows. DataError for a damaged file."""
        num_bytes = sum(file.stat().st_size for source in self._sources for file in find_files(source.path))
        with tqdm(total=num_bytes, unit="B", unit_scale=True, desc="preparing") as progress:
            for source, share in zip(self._sources, self._shares, strict=True):
                yield from self._read_input(source, share, progress)

    def _read_input(self, source: Input, share: int, progress: "tqdm[Any]") -> Iterator[Sample]:
        selection = Selection(source, share)
        num_rows = self.tally.num_rows_in
        for converted in self._workers.convert(read_chunks(source)):
            for outcome in converted.outcomes:
                outcome, copies = selection.weigh(self._duplicates.remove(outcome))
                self.tally.count(outcome)
                if copies:
                    yield from selection.push(outcome.samples, copies)
            progress.set_postfix_str(f"{self.tally.num_rows_in:,} rows, {self.tally.num_rows_kept:,} kept", refresh=False)
            progress.update(converted.num_bytes)
        self.held_out += selection.held_out()
        rows = {"rows_in": self.tally.num_rows_in - num_rows, "rows_usable": selection.num_rows}
        self.rows_per_input.append({"name": source.path.name, **rows, "weight": source.weight})


def prepare(preparation: Preparation, outs: dict[str, Path], key: dict[str, Any], model: Path, num_held_out: int) -> None:
    """Write the data sets; each appears complete or not at all, and the table as report.json beside the first.

    Raises:
        DataError: an input is unreadable, or no row is left for training.
    """
    source = {"made_by": "launch.prepare", "model": str(model), "vocabulary": fingerprint_vocabulary(model), "key": key}
    sources = {split: source | {"split": split} for split in outs}
    with ExitStack() as stack:
        writers = {split: stack.enter_context(DatasetWriter(outs[split], sources[split], replace=True)) for split in outs}
        for sample in preparation.read():
            writers["train"].add(*sample)
        if not writers["train"].num_samples:
            kept = f"{preparation.tally.num_samples} samples of {preparation.tally.num_rows_kept}"
            raise DataError(f"--input: needed at least {num_held_out + 1} usable rows, found {kept}")
        for sample in preparation.held_out:
            writers["eval"].add(*sample)
        writers["train"].attach("report.json", json.dumps(make_report(preparation, writers), indent=2).encode() + b"\n")


def make_report(preparation: Preparation, writers: dict[str, DatasetWriter]) -> dict[str, Any]:
    """What `report.json` says."""
    written = {split: writer.num_samples for split, writer in writers.items()}
    return preparation.tally.as_json() | {"inputs": preparation.rows_per_input, "written": written}


def find_former_key(folder: Path) -> dict[str, Any] | None:
    """The key under which a folder was prepared; None where there is no folder.

    Raises:
        DataError: the folder is something else, which is left alone.
    """
    if not folder.exists():
        return None
    try:
        key = Dataset.open(folder, damaged=True).manifest.source.get("key")
    except DataError as error:
        raise DataError(f"{folder}: needed a new folder, found one that exists and is no prepared data set") from error
    if not isinstance(key, dict):
        raise DataError(f"{folder}: needed a new folder, found one that exists and was not made by launch.prepare")
    return key


def is_up_to_date(outs: dict[str, Path], key: dict[str, Any]) -> bool:
    """Whether the command would write what is there; says what changed where it would not. DataError as above."""
    former = {split: find_former_key(folder) for split, folder in outs.items()}
    for line in dict.fromkeys(line for before in former.values() for line in differences(before or key, key)):
        print(f"changed: {line}", flush=True)
    if any(before != key for before in former.values()):
        return False
    try:
        for folder in outs.values():
            Dataset.open(folder)
    except DataError as error:
        print(f"made again: {error}", flush=True)
        return False
    return True


def make_key(settings: Settings, arguments: argparse.Namespace) -> dict[str, Any]:
    """Everything that changes the output."""
    return {
        "inputs": describe_inputs(arguments.input),
        **describe_tokenizer(Converter(settings).tokenizer),
        "template_settings": settings.template_settings,
        "rules": describe_rules(),
        **settings.limits._asdict(),
        "assistant_roles": sorted(settings.assistant_roles),
        "eval_samples": arguments.eval_samples,
    }


def count_workers(sources: list[Input]) -> int:
    """One per core, fewer for small inputs."""
    num_bytes = sum(file.stat().st_size for source in sources for file in find_files(source.path))
    return min(len(os.sched_getaffinity(0)), 1 + num_bytes // _BYTES_PER_WORKER)


def parse_setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE with VALUE in JSON, or a bare word."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text}: needed KEY=VALUE, such as enable_thinking=false")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="the target: its tokenizer is used")
    add("--input", type=parse_input, action="append", required=True, metavar="PATH[,weight=W][,rows=N]", help="repeatable")
    add("--out", type=Path, required=True, metavar="DIR")
    add("--eval-out", type=Path, metavar="DIR")
    add("--eval-samples", type=int, default=0, metavar="N", help="the last N samples kept are held out")
    add("--max-length", type=int, default=8192, metavar="L", help="longer rows are dropped")
    add("--truncate", action="store_true", help="cut longer rows instead")
    add("--template", type=Path, metavar="FILE.jinja", help="instead of the tokenizer's own chat template")
    add("--template-set", type=parse_setting, action="append", default=[], metavar="KEY=VALUE", help="variables for it")
    add("--assistant-role", action="append", default=[], metavar="NAME", help="a name of the assistant in the data")
    add("--workers", type=int, metavar="N", help="processes (default: the cores, fewer for small inputs)")
    arguments = parser.parse_args(argv)
    if (arguments.eval_out is not None) != (arguments.eval_samples > 0):
        parser.error("--eval-out and --eval-samples go together")
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 1 after one line that says what is wrong."""
    arguments = parse_arguments(argv)
    try:
        model = arguments.model.expanduser()
        limits = Limits(read_vocab_size(model), arguments.max_length, arguments.truncate)
        settings = Settings(model, arguments.template, dict(arguments.template_set), limits, arguments.assistant_role)
        outs = {"train": arguments.out} | ({"eval": arguments.eval_out} if arguments.eval_out else {})
        key = json.loads(json.dumps(make_key(settings, arguments)))
        if is_up_to_date(outs, key):
            print(f"kept, nothing changed: {', '.join(map(str, outs.values()))}")
            return 0
        with Workers(settings, arguments.workers or count_workers(arguments.input)) as workers:
            preparation = Preparation(workers, arguments.input, arguments.eval_samples)
            try:
                prepare(preparation, outs, key, model, arguments.eval_samples)
            finally:
                print(format_report(preparation.tally.as_json()), flush=True)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
