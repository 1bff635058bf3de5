from argparse import ArgumentParser

from common.lifecycle import run_actor
from services.target.service import main


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--ring-fd", type=int, required=True)


if __name__ == "__main__":
    run_actor("target", main, add_arguments)
