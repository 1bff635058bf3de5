from common.actor.parent import die_with_parent

die_with_parent()  # first: the imports below take seconds, in which the supervisor may die

from argparse import ArgumentParser  # noqa: E402

from common.actor.lifecycle import run_actor  # noqa: E402
from services.drafter.service import main  # noqa: E402


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ring-fds", type=_numbers, required=True, help="one per target, separated by commas")


if __name__ == "__main__":
    run_actor("drafter", main, add_arguments)
