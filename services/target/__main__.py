from common.actor.parent import die_with_parent

die_with_parent()  # first: the imports below take seconds, in which the supervisor may die

from argparse import ArgumentParser  # noqa: E402

from common.actor.lifecycle import run_actor  # noqa: E402
from services.target.service import main  # noqa: E402


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ring-fd", type=int, required=True)


if __name__ == "__main__":
    run_actor("target", main, add_arguments)
