"""Shows a data set: what it holds, single rows with their supervised tokens marked, its lengths, its damage.

    python -m launch.inspect DATASET
    python -m launch.inspect DATASET --row 0 --row 17
    python -m launch.inspect DATASET --verify
    python -m launch.inspect DATASET --histogram lengths.png

Supervised text stands between ⟦ and ⟧, in colour on a terminal. Text needs the tokenizer: that of the model the
set was prepared for, or --model; without one the ids are shown.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from common.data.arrow_file import Sample
from common.data.damage import find_damage
from common.data.dataset import Dataset
from common.errors import DataError, HeadraceError
from launch.data.chat import open_tokenizer
from launch.data.rules import format_report, histogram
from launch.histogram import draw_histogram

SUPERVISED, OTHER = "bold green", "dim"


def describe(dataset: Dataset) -> str:
    """The manifest, and the table of its preparation where there is one."""
    manifest = dataset.manifest
    supervised = manifest.num_supervised_tokens
    lines = [
        ("samples", f"{manifest.num_samples:,} in {len(manifest.files)} files of {_megabytes(dataset)}"),
        ("tokens", f"{manifest.num_tokens:,}, at most {manifest.max_length:,} in a sample"),
        ("supervised", "not counted" if supervised is None else f"{supervised:,} ({supervised / manifest.num_tokens:.1%})"),
        ("fingerprint", manifest.fingerprint),
        *_flatten(manifest.source),
    ]
    lines += [(f"{name} tokens", f"{count:,}") for name, count in histogram(dataset.lengths).items()]
    text = "\n".join(f"{name:<26} {value}" for name, value in lines)
    report = dataset.folder / "report.json"
    return f"{text}\n\n{format_report(json.loads(report.read_text()))}" if report.is_file() else text


def render_row(sample: Sample, tokenizer: PreTrainedTokenizerBase | None) -> Text:
    """The row's text with what is supervised in another style and between brackets; ids without a tokenizer."""
    text, place = Text(), 0
    for supervised, run in itertools.groupby(sample.loss_mask.tolist()):
        ids = sample.input_ids[place : (place := place + len(list(run)))].tolist()
        shown = " ".join(map(str, ids)) if tokenizer is None else str(tokenizer.decode(ids))
        text.append(f"⟦{shown}⟧" if supervised else shown, SUPERVISED if supervised else OTHER)
        if tokenizer is None:
            text.append(" ")
    return text


def show_row(console: Console, dataset: Dataset, row: int, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """One row under a line of its numbers.

    Raises:
        DataError: no such row, or a damaged one.
    """
    if not 0 <= row < dataset.num_samples:
        raise DataError(f"--row: needed 0 to {dataset.num_samples - 1}, found {row}")
    sample = dataset.read(row)
    num_tokens, num_supervised = len(sample.input_ids), int(sample.loss_mask.sum())
    name = f"row {row}, {sample.category}" if sample.category else f"row {row}"
    console.rule(f"{name}: {num_tokens:,} tokens, {num_supervised:,} supervised ({num_supervised / num_tokens:.1%})")
    console.print(render_row(sample, tokenizer), soft_wrap=True)


def verify(folder: Path) -> int:
    """Compare every file with its checksum, print what is damaged; exit code 0 or 1."""
    dataset = Dataset.open(folder, damaged=True)
    damage = find_damage(folder)
    for line in damage:
        print(line)
    unknown = sum(not entry.sha256 for entry in dataset.manifest.files)
    without = f" ({unknown} without a checksum: only their structure was checked)" if unknown else ""
    print(f"{folder}: {len(dataset.manifest.files)} files, {len(damage)} damaged{without}")
    return 1 if damage else 0


def find_tokenizer(dataset: Dataset, model: Path | None) -> PreTrainedTokenizerBase | None:
    """That of `model`, else of the model the set was prepared for, where it is still there. ModelError for `model`."""
    recorded = dataset.manifest.source.get("model")
    if model is None and (not isinstance(recorded, str) or not (Path(recorded) / "config.json").is_file()):
        return None
    return open_tokenizer((model or Path(str(recorded))).expanduser())


def _megabytes(dataset: Dataset) -> str:
    return f"{sum(entry.num_bytes for entry in dataset.manifest.files) / 1e6:,.1f} MB"


def _flatten(source: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for key, value in source.items():
        lines += _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", str(value))]
    return lines


def main(argv: list[str] | None = None) -> int:
    """Exit code 0, or 1 for damage or after one line that says what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", type=Path, metavar="DATASET")
    parser.add_argument("--row", type=int, action="append", default=[], metavar="N", help="repeatable")
    parser.add_argument("--model", type=Path, metavar="DIR", help="whose tokenizer turns ids into text")
    parser.add_argument("--verify", action="store_true", help="check every file against its checksum and every damaged row")
    parser.add_argument("--histogram", type=Path, metavar="FILE.png")
    arguments = parser.parse_args(argv)
    try:
        if arguments.verify:
            return verify(arguments.dataset)
        dataset = Dataset.open(arguments.dataset)
        if arguments.row:
            tokenizer, console = find_tokenizer(dataset, arguments.model), Console(highlight=False)
            for row in arguments.row:
                show_row(console, dataset, row, tokenizer)
        if arguments.histogram:
            draw_histogram(dataset, arguments.histogram)
            print(arguments.histogram)
        if not arguments.row and not arguments.histogram:
            print(describe(dataset))
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
