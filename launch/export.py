"""Write a drafter from a checkpoint, and refuse one that does not read back as the trained one.

    python -m launch.export RUN --out DIR [--step N | --best] [--format dflash|speculators]

Without --step and --best it takes the newest checkpoint; the best is that of the highest held-out acceptance. The folder is
read again before it gets its name: it must state the same drafter and hold the same numbers.
Exit code 0: done; 2: refused.
"""

import argparse
import sys
from pathlib import Path

from common import config
from common.acceptance import find_best
from common.errors import CheckpointError
from common.run_dir import CHECKPOINTS
from launch.arguments import make_parser, run_command
from services.drafter.folder.checkpoint import checkpoint_folder, draft_identity, latest, load_weights
from services.drafter.folder.engine_config import LayoutName
from services.drafter.folder.export import export

LAYOUTS: tuple[LayoutName, ...] = ("dflash", "speculators")


def find_checkpoint(run_dir: Path, step: int | None, best: bool) -> Path:
    """Return the checkpoint of a step, the best, or the newest; CheckpointError where there is none."""
    if best:
        evaluation = find_best(run_dir)
        if evaluation is None:
            raise CheckpointError(f"{run_dir / CHECKPOINTS}: needed a checkpoint with its held-out acceptance, found none")
        return checkpoint_folder(run_dir, evaluation.step)
    folder = latest(run_dir) if step is None else checkpoint_folder(run_dir, step)
    if folder is None:
        raise CheckpointError(f"{run_dir / CHECKPOINTS}: needed a checkpoint, found none")
    return folder


def run(run_dir: Path, out: Path, checkpoint: Path, layout: LayoutName) -> str:
    """Export a checkpoint to `out` and return a line for people; HeadraceError where it cannot be read or written."""
    settings = config.read(run_dir)
    record, weights = load_weights(checkpoint, draft_identity(settings))
    export(out, settings, weights, record.step, record.evaluation, layout)
    return f"{out}: {len(weights)} tensors of step {record.step}, read back and equal"


def _export(arguments: argparse.Namespace) -> None:
    checkpoint = find_checkpoint(arguments.run, arguments.step, arguments.best)
    print(run(arguments.run, arguments.out, checkpoint, arguments.format))


def main() -> int:
    """Read the command line and export."""
    parser = make_parser("export", __doc__)
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write; an earlier export is replaced")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, metavar="N", help="optimizer step of the checkpoint")
    which.add_argument("--best", action="store_true", help="the checkpoint of the highest held-out acceptance")
    parser.add_argument("--format", choices=LAYOUTS, default="dflash", help="default: %(default)s")
    return run_command(_export, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
