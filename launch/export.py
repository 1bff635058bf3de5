"""Writes a drafter from a checkpoint: `python -m launch.export RUN --out DIR [--step N]`."""

import argparse
import sys
from pathlib import Path

from common import config
from common.errors import CheckpointError, HeadraceError
from services.drafter.checkpoint import checkpoint_folder, draft_identity, latest, load_weights
from services.drafter.export import export


def run(run_dir: Path, out: Path, step: int | None) -> str:
    """Export the checkpoint of `step`, or the newest, to `out`; returns what was done, in one line.

    Raises:
        HeadraceError: no such run or checkpoint, or the export could not be written.
    """
    settings = config.read(run_dir)
    folder = latest(run_dir) if step is None else checkpoint_folder(run_dir, step)
    if folder is None:
        raise CheckpointError(f"{run_dir / 'checkpoints'}: needed a checkpoint, found none")
    checkpoint, weights = load_weights(folder, draft_identity(settings))
    export(out, settings, weights, checkpoint.step, checkpoint.metrics.get("acceptance"))
    return f"{out}: {len(weights)} tensors of step {checkpoint.step}"


def main() -> int:
    """Read the command line; 0 done, 2 refused."""
    parser = argparse.ArgumentParser(prog="python -m launch.export", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory")
    parser.add_argument("--out", type=Path, required=True, help="folder to write; replaced if it is there")
    parser.add_argument("--step", type=int, help="optimizer step of the checkpoint (default: the newest)")
    arguments = parser.parse_args()
    try:
        print(run(arguments.run, arguments.out, arguments.step))
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
