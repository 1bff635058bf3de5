"""Find where a trained drafter differs from the one that an inference engine executes, and name the first stage.

    python -m launch.parity RUN                                  its export against its checkpoint in training form
    python -m launch.parity DIR --model TARGET                   a drafter's folder against the training form for this target
    python -m launch.parity DIR --reference RUN                  a folder against the checkpoint of a run
    python -m launch.parity DIR --model TARGET --reference DIR   two folders

The subject is always executed as an engine does: one block behind cached keys and values, settings and weights out of the
folder with the engines' defaults, embedding, head and hidden states out of the target's own files by transformers. With a
run, --model names the target that the engine loads, where it is not the one of training. Both sides compute in float32
from equal weights, so a difference is a fault and no rounding.

Known without a run: whether rotation, masks and shapes are those that training uses for this target. Unknown: which layers,
window, mask token or weights the drafter had while it was trained; wrong ones execute like right ones. Settings that
contradict the target are reported as warnings (a mask token that text contains, layer ids off by one, a norm that was never
loaded); other faults show only beside the run, or beside a folder that is known to be right. A random head is the target's
fault, not the folder's: give the engine's target as --model beside the run.

Exit code 0: the same; 1: something differs; 2: bad input.
"""

import argparse
import sys
from pathlib import Path

import msgspec
import torch

from launch.arguments import make_parser, parse_device, run_command
from launch.parity.report import format_report
from launch.parity.request import answer


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser("parity", __doc__)
    parser.add_argument("subject", type=Path, metavar="RUN|DIR", help="run directory or a drafter's folder")
    parser.add_argument("--reference", metavar="WHAT", help="training, a run directory or a drafter's folder")
    parser.add_argument("--model", type=Path, metavar="TARGET", help="the engine's target (default: that of the run)")
    parser.add_argument("--data", type=Path, metavar="DATASET", help="default: the run's evaluation samples, or made-up ids")
    parser.add_argument("--step", type=int, metavar="N", help="of the run's checkpoint (default: the newest)")
    parser.add_argument("--num-documents", type=int, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=192, metavar="N", help="of a document (default: %(default)s)")
    parser.add_argument("--device", type=parse_device, default="cpu", help="of the target (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of the CPU (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="for programs")
    arguments = parser.parse_args(argv)
    for name in ("num_documents", "max_tokens", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: needed at least 1, found {getattr(arguments, name)}")
    return arguments


def _compare(options: argparse.Namespace) -> int:
    torch.set_num_threads(options.threads)
    report = answer(options)
    as_text = msgspec.json.format(msgspec.json.encode(report), indent=2).decode()  # null for numbers that are not finite
    print(as_text if options.json else format_report(report))
    return 0 if report.same else 1


def main(argv: list[str] | None = None) -> int:
    """Read the command line and compare."""
    return run_command(_compare, parse(argv))


if __name__ == "__main__":
    sys.exit(main())
