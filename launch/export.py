"""Writes a drafter from a checkpoint, and refuses one that does not compute what was trained.

    python -m launch.export RUN --out DIR [--step N | --best] [--format dflash|speculators]

Without --step and --best it takes the newest checkpoint; the best is that of the highest held-out acceptance. What was
written is read again and run next to the checkpoint's weights on held-out rows, see launch/logit_check.py.
"""

import argparse
import sys
from pathlib import Path

import torch

from common import config
from common.acceptance import find_best
from common.errors import CheckpointError, HeadraceError
from launch.arguments import parse_device
from launch.logit_check import Comparison, LogitCheck
from services.drafter.folder.checkpoint import checkpoint_folder, draft_identity, latest, load_weights
from services.drafter.folder.engine_config import LayoutName
from services.drafter.folder.export import export

LAYOUTS: tuple[LayoutName, ...] = ("dflash", "speculators")


def find_checkpoint(run_dir: Path, step: int | None, best: bool) -> Path:
    """The checkpoint of a step, the best, or the newest.

    Raises:
        CheckpointError: there is none, or none that was measured.
    """
    if best:
        evaluation = find_best(run_dir)
        if evaluation is None:
            raise CheckpointError(f"{run_dir / 'checkpoints'}: needed a checkpoint with its held-out acceptance, found none")
        return checkpoint_folder(run_dir, evaluation.step)
    folder = latest(run_dir) if step is None else checkpoint_folder(run_dir, step)
    if folder is None:
        raise CheckpointError(f"{run_dir / 'checkpoints'}: needed a checkpoint, found none")
    return folder


def run(run_dir: Path, out: Path, checkpoint: Path, layout: LayoutName, num_rows: int, device: torch.device) -> str:
    """Export a checkpoint to `out`; returns what was done, in lines.

    Raises:
        HeadraceError: no such run or checkpoint, the export could not be written, or its logits are others.
    """
    settings = config.read(run_dir)
    record, weights = load_weights(checkpoint, draft_identity(settings))
    check = LogitCheck(settings, weights, num_rows, device)
    found: list[Comparison] = []
    export(out, settings, weights, record.step, record.evaluation, layout, lambda folder: found.append(check.compare(folder)))
    (measured,) = found
    return f"{out}: {len(weights)} tensors of step {record.step}\n{measured}"


def main() -> int:
    """Read the command line; 0 done, 2 refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; an earlier export is replaced")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="optimizer step of the checkpoint")
    which.add_argument("--best", action="store_true", help="the checkpoint of the highest held-out acceptance")
    parser.add_argument("--format", choices=LAYOUTS, default="dflash", help="default: %(default)s")
    parser.add_argument("--rows", type=int, default=4, metavar="N", help="held-out rows to compare on (default: %(default)s)")
    parser.add_argument("--device", type=parse_device, default="cpu", help="for target and comparison (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="of the CPU (default: %(default)s)")
    arguments = parser.parse_args()
    for name in ("rows", "threads"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name}: needed at least 1, found {getattr(arguments, name)}")
    torch.set_num_threads(arguments.threads)
    try:
        checkpoint = find_checkpoint(arguments.run, arguments.step, arguments.best)
        print(run(arguments.run, arguments.out, checkpoint, arguments.format, arguments.rows, arguments.device))
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
