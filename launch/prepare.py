"""Turn conversations into prepared data sets: token ids, and a mask of the assistant's answers.

    python -m launch.prepare --model DIR --input conversations.jsonl --out DIR --eval-out DIR --eval-samples 24

Files: JSON lines, JSON, Parquet, Arrow, plain or compressed, folders of these, folders of Hugging Face datasets; see
launch/data/conversations.py for the forms of a row. The last rows kept of each data set are held out, in equal shares.
A data set that is there is refused, or replaced in one piece with `--overwrite`.
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
from common.errors import DataError
from common.target_shape import read_vocab_size
from launch.arguments import make_parser, run_command
from launch.data.conversion import Convert, Settings, open_workers
from launch.data.inputs import Input, find_files, find_skipped, parse_input, read_chunks
from launch.data.rules import Limits, Tally, format_report
from launch.data.selection import Duplicates, Selection, share_out
from launch.data.vocabulary import fingerprint_vocabulary
from launch.data.writer import DatasetWriter

_BYTES_PER_WORKER = 16 << 20  # a worker costs seconds to start


class Preparation:
    """Reads every input once, yields the samples for training, keeps those held out."""

    def __init__(self, sources: list[Input], num_held_out: int) -> None:
        self.tally = Tally()
        self.held_out: list[Sample] = []
        self.rows_per_input: list[dict[str, Any]] = []
        self.num_bytes = sum(file.stat().st_size for source in sources for file in find_files(source.path))
        self._sources = sources
        self._shares = share_out(num_held_out, len(sources))
        self._duplicates = Duplicates()

    def read(self, convert: Convert) -> Iterator[Sample]:
        """Yield the samples for training, in the order of the inputs and their rows. DataError for a damaged file."""
        with tqdm(total=self.num_bytes, unit="B", unit_scale=True, desc="preparing") as progress:
            for source, share in zip(self._sources, self._shares, strict=True):
                yield from self._read_input(source, share, convert, progress)

    def _read_input(self, source: Input, share: int, convert: Convert, progress: "tqdm[Any]") -> Iterator[Sample]:
        selection = Selection(source, share)
        num_rows = self.tally.num_rows_in
        for outcomes, num_bytes in convert(read_chunks(source)):
            for outcome in outcomes:
                outcome, copies = selection.weigh(self._duplicates.remove(outcome))
                self.tally.count(outcome)
                if copies:
                    yield from selection.push(outcome.samples, copies)
            progress.set_postfix_str(f"{self.tally.num_rows_in:,} rows, {self.tally.num_rows_kept:,} kept", refresh=False)
            progress.update(num_bytes)
        self.held_out += selection.held_out()
        rows = {"rows_in": self.tally.num_rows_in - num_rows, "rows_usable": selection.num_rows}
        self.rows_per_input.append({"name": source.path.name, **rows, "weight": source.weight})

    def report(self, written: dict[str, int]) -> bytes:
        """Return the content of report.json."""
        report = self.tally.as_json() | {"inputs": self.rows_per_input, "written": written}
        return json.dumps(report, indent=2).encode() + b"\n"


def prepare(preparation: Preparation, convert: Convert, arguments: argparse.Namespace) -> None:
    """Write the data sets, each complete or not at all. DataError for an unreadable input, or no row left for training."""
    model = arguments.model.expanduser()
    source = {"made_by": "launch.prepare", "model": str(model), "vocabulary": fingerprint_vocabulary(model)}
    outs = {"train": arguments.out} | ({"eval": arguments.eval_out} if arguments.eval_out else {})
    with ExitStack() as stack:
        writers = {
            split: stack.enter_context(DatasetWriter(out, source | {"split": split}, replace=arguments.overwrite))
            for split, out in outs.items()
        }
        for sample in preparation.read(convert):
            writers["train"].add(*sample)
        if not writers["train"].num_samples:
            kept = f"{len(preparation.tally.lengths)} samples of {preparation.tally.num_rows_kept}"
            raise DataError(f"--input: needed at least {arguments.eval_samples + 1} usable rows, found {kept}")
        for sample in preparation.held_out:
            writers["eval"].add(*sample)
        written = {split: writer.num_samples for split, writer in writers.items()}
        writers["train"].attach("report.json", preparation.report(written))


def check_outs(out: Path, eval_out: Path | None) -> None:
    """Raise DataError where one data set would lie in the other."""
    train, held_out = out.resolve(), (eval_out or out).resolve()
    if eval_out and (train.is_relative_to(held_out) or held_out.is_relative_to(train)):
        raise DataError(f"--eval-out: needed a folder neither in --out nor around it, found {eval_out} and {out}")


def parse_setting(text: str) -> tuple[str, Any]:
    """Parse KEY=VALUE with VALUE in JSON, or a bare word, for argparse."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text}: needed KEY=VALUE, such as enable_thinking=false")
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser("prepare", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="DIR", help="the target: its tokenizer is used")
    add("--input", type=parse_input, action="append", required=True, metavar="PATH[,weight=W][,rows=N]", help="repeatable")
    add("--out", type=Path, required=True, metavar="DIR")
    add("--eval-out", type=Path, metavar="DIR")
    add("--overwrite", action="store_true", help="replace the data sets that are there")
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


def _prepare(arguments: argparse.Namespace) -> None:
    model = arguments.model.expanduser()
    limits = Limits(read_vocab_size(model), arguments.max_length, arguments.truncate)
    settings = Settings(model, arguments.template, dict(arguments.template_set), limits, arguments.assistant_role)
    check_outs(arguments.out, arguments.eval_out)
    for file in (file for source in arguments.input for file in find_skipped(source.path)):
        print(f"not read: {file}", file=sys.stderr)
    preparation = Preparation(arguments.input, arguments.eval_samples)
    num_workers = min(len(os.sched_getaffinity(0)), 1 + preparation.num_bytes // _BYTES_PER_WORKER)
    with open_workers(settings, arguments.workers or num_workers) as convert:
        try:
            prepare(preparation, convert, arguments)
        finally:
            print(format_report(preparation.tally.as_json()), flush=True)


def main(argv: list[str] | None = None) -> int:
    """Read the command line and prepare."""
    return run_command(_prepare, parse_arguments(argv))


if __name__ == "__main__":
    sys.exit(main())
