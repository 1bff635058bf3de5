from argparse import ArgumentParser

from common.lifecycle import run_actor
from services.drafter.service import main


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ring-fds", type=_numbers, required=True, help="one per target, separated by commas")


if __name__ == "__main__":
    run_actor("drafter", main, add_arguments)
