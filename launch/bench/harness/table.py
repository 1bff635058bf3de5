"""The command line and the table that the measurements share."""

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence

from launch import arguments

Rows = Iterator[tuple[str, str]]  # name and value, as they are measured


def make_parser(name: str, description: str | None, shapes: Sequence[str], default: str) -> ArgumentParser:
    """Make the parser of `python -m launch.bench NAME`, with --shape and --set."""
    parser = arguments.make_parser(f"bench {name}", description)
    parser.add_argument("--shape", choices=shapes, default=default)
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    return parser


def print_rows(rows: Rows) -> None:
    for name, value in rows:
        print(f"{name:58} {value}", flush=True)
