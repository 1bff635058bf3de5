"""Exit codes, one-line errors and options that the command lines share. Loads no torch unless a device is named."""

import argparse
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from common.errors import HeadraceError, RunDirectoryBusyError

if TYPE_CHECKING:
    import torch

EXIT_DONE, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_BUSY, EXIT_SIGNAL = 0, 1, 2, 3, 128
_Options = TypeVar("_Options")


def run_command(run: Callable[[_Options], int | None], options: _Options) -> int:
    """Run a command and return its exit code; an error that a person can mend becomes one line.

    Args:
        run: the body of the command; returns an exit code, or None for 0.
        options: the parsed command line.
    """
    try:
        return run(options) or EXIT_DONE
    except KeyboardInterrupt:
        return EXIT_SIGNAL + signal.SIGINT
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BUSY if isinstance(error, RunDirectoryBusyError) else EXIT_BAD_INPUT


def make_parser(command: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m launch.COMMAND` that shows the description as it is written."""
    return argparse.ArgumentParser(
        prog=f"python -m launch.{command}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_device(text: str) -> "torch.device":
    """Parse cpu or cuda:N, for argparse."""
    import torch

    try:
        device = torch.device(text)
    except RuntimeError as error:
        raise argparse.ArgumentTypeError(f"needed cpu or cuda:N, found {text}") from error
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise argparse.ArgumentTypeError(f"needed {text}, found {num_gpus} GPUs")
    return device
