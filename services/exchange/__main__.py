from argparse import ArgumentParser

from common.lifecycle import run_actor
from services.exchange.service import main


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--control-fd", type=int, required=True)


if __name__ == "__main__":
    run_actor("exchange", main, add_arguments)
