"""Show a data set: its manifest and lengths, single rows with their supervised tokens marked, its damage.

    python -m launch.inspect DATASET
    python -m launch.inspect DATASET --row 0 --row 17
    python -m launch.inspect DATASET --verify

Supervised text stands between ⟦ and ⟧, in colour on a terminal. Text needs the tokenizer: that of the model the
set was prepared for, or --model; without one the ids are shown.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path

import numpy as np
from rich.bar import Bar
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from common.data.arrow_file import Sample
from common.data.dataset import Dataset
from common.errors import DataError
from launch.arguments import make_parser, run_command
from launch.data.chat import open_tokenizer
from launch.data.damage import find_damage
from launch.data.rules import format_report, histogram

SUPERVISED, OTHER = "bold green", "dim"
_MAX_READ = 10_000  # samples whose masks are read
_BAR_WIDTH = 24


def describe(dataset: Dataset) -> str:
    """Return the manifest, and the table of its preparation where there is one."""
    manifest = dataset.manifest
    supervised = manifest.num_supervised_tokens
    megabytes = sum(entry.num_bytes for entry in manifest.files) / 1e6
    lines = [
        ("samples", f"{manifest.num_samples:,} in {len(manifest.files)} files of {megabytes:,.1f} MB"),
        ("tokens", f"{manifest.num_tokens:,}, at most {manifest.max_length:,} in a sample"),
        ("supervised", "not counted" if supervised is None else f"{supervised:,} ({supervised / manifest.num_tokens:.1%})"),
        ("fingerprint", manifest.fingerprint),
        *((name, str(value)) for name, value in manifest.source.items()),
    ]
    text = "\n".join(f"{name:<26} {value}" for name, value in lines)
    report = dataset.folder / "report.json"
    return f"{text}\n\n{format_report(json.loads(report.read_text()))}" if report.is_file() else text


def draw_lengths(dataset: Dataset) -> Table:
    """Count tokens of all samples, and supervised tokens of evenly spaced ones, by length. DataError as `Dataset.read`."""
    rows = np.unique(np.linspace(0, dataset.num_samples - 1, min(_MAX_READ, dataset.num_samples)).astype(int))
    supervised = histogram(np.array([dataset.read(int(row)).loss_mask.sum() for row in rows], np.int32))
    lengths = histogram(dataset.lengths)
    table = Table("tokens", "samples", "", f"supervised, of {len(rows):,} samples", "", box=None)
    for name, count in lengths.items():
        some = supervised.get(name, 0)
        bars = Bar(dataset.num_samples, 0, count, width=_BAR_WIDTH), Bar(len(rows), 0, some, width=_BAR_WIDTH)
        table.add_row(name, f"{count:,}", bars[0], f"{some:,}", bars[1])
    return table


def render_row(sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    """Return the row's text, the supervised part in another style and between brackets; ids without a tokenizer."""
    text, start = Text(), 0
    for supervised, run in itertools.groupby(sample.loss_mask.tolist()):
        ids = sample.input_ids[start : (start := start + len(list(run)))].tolist()
        shown = " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))
        text.append(f"⟦{shown}⟧" if supervised else shown, SUPERVISED if supervised else OTHER)
        if tokenizer is None:
            text.append(" ")
    return text


def show_row(console: Console, dataset: Dataset, row: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Print one row under a line of its numbers. DataError for no such row, or a damaged one."""
    if not 0 <= row < dataset.num_samples:
        raise DataError(f"--row: needed 0 to {dataset.num_samples - 1}, found {row}")
    sample = dataset.read(row)
    num_tokens, num_supervised = len(sample.input_ids), int(sample.loss_mask.sum())
    name = f"row {row}, {sample.category}" if sample.category else f"row {row}"
    console.rule(f"{name}: {num_tokens:,} tokens, {num_supervised:,} supervised ({num_supervised / num_tokens:.1%})")
    console.print(render_row(sample, tokenizer), soft_wrap=True)


def verify(folder: Path) -> int:
    """Compare every file with its checksum, print the damage; return exit code 0 or 1."""
    dataset = Dataset.open(folder, damaged=True)
    damage = find_damage(dataset)
    for line in damage:
        print(line)
    unknown = sum(not entry.sha256 for entry in dataset.manifest.files)
    without = f" ({unknown} without a checksum: only their structure was checked)" if unknown else ""
    print(f"{folder}: {len(dataset.manifest.files)} files, {len(damage)} damaged{without}")
    return 1 if damage else 0


def find_tokenizer(dataset: Dataset, model: Path | None) -> PreTrainedTokenizerBase | None:
    """Open that of `model`, else of the model the set was prepared for, where it is still there. ModelError for `model`."""
    recorded = dataset.manifest.source.get("model")
    if model is None and (not isinstance(recorded, str) or not (Path(recorded) / "config.json").is_file()):
        return None
    return open_tokenizer((model or Path(str(recorded))).expanduser())


def _inspect(arguments: argparse.Namespace) -> int:
    if arguments.verify:
        return verify(arguments.dataset)
    dataset, console = Dataset.open(arguments.dataset), Console(highlight=False)
    tokenizer = find_tokenizer(dataset, arguments.model) if arguments.row else None
    for row in arguments.row:
        show_row(console, dataset, row, tokenizer)
    if not arguments.row:
        print(describe(dataset), end="\n\n", flush=True)
        console.print(draw_lengths(dataset))
    return 0


def main(argv: list[str] | None = None) -> int:
    """Read the command line and show; return 1 for damage."""
    parser = make_parser("inspect", __doc__)
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument("--row", type=int, action="append", default=[], metavar="N", help="repeatable")
    parser.add_argument("--model", type=Path, metavar="DIR", help="whose tokenizer turns ids into text")
    parser.add_argument("--verify", action="store_true", help="check every file against its checksum and every damaged row")
    return run_command(_inspect, parser.parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
