"""Takes over a drafter that somebody else trained, as the start of a run.

    python -m launch.import_draft DIR --config CONFIG.toml|RUN --out DIR2
    python -m launch.start_all CONFIG.toml --set draft.init=DIR2

DIR may have the layout of z-lab, SpecForge, speculators, TorchSpec or this project (services/drafter/folder/layouts.py). It is
compared with the target and the draft model of the configuration; all that does not fit is named, and nothing is written.
"""

import argparse
import sys
from pathlib import Path

import torch

from common import config as configuration
from common.config import Config
from common.errors import CheckpointError, HeadraceError
from services.drafter.folder.drafter_folder import Drafter, read_drafter
from services.drafter.folder.export import write_drafter


def read_config(path: Path) -> Config:
    """The configuration of a TOML file, or of a run directory. ConfigError where it is neither."""
    return configuration.read(path) if path.is_dir() else configuration.load(path, [])


def take_over(folder: Path, config: Config, out: Path) -> Drafter:
    """Write the drafter of `folder` to `out` in the layout of this project, without changing a bit of its weights.

    Raises:
        CheckpointError: unreadable, does not fit, or holds numbers that are not finite; or `out` is something else.
    """
    if out.resolve() == folder.resolve():
        raise CheckpointError(f"--out: needed another folder than {folder}")
    drafter = read_drafter(folder)
    if misfits := drafter.misfits(config):
        lines = "".join(f"\n  {line}" for line in misfits)
        raise CheckpointError(f"{folder} ({drafter.layout} layout) does not fit the configuration:{lines}")
    weights = drafter.weights()
    for name, weight in weights.items():
        if num_bad := int((~weight.isfinite()).sum()):
            raise CheckpointError(f"{folder}: tensor {name}: needed finite numbers, found {num_bad} others")
    rounded = {name: weight.bfloat16() for name, weight in weights.items()}
    is_exact = all(torch.equal(rounded[name].float(), weight) for name, weight in weights.items())
    card = f"# A drafter to begin from\n\nTaken over from a folder of the {drafter.layout} layout by launch.import_draft.\n"
    write_drafter(out, config, rounded if is_exact else weights, card)
    return drafter


def describe(drafter: Drafter) -> list[str]:
    """What was found, and what the configuration had to fill in."""
    lines = [f"{drafter.folder}: {drafter.layout} layout, {len(drafter.tensors)} tensors, fits"]
    left_open = [key for key in ("block_size", "mask_token_id", "tap_layers", "rope_theta") if key not in drafter.settings]
    return [*lines, f"not stated there, taken from the configuration: {', '.join(left_open)}"] if left_open else lines


def main(argv: list[str] | None = None) -> int:
    """Read the command line; 0 done, 2 refused."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="the drafter to take over")
    parser.add_argument("--config", type=Path, required=True, metavar="PATH", help="TOML file or run directory to fit to")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR2", help="folder to write")
    arguments = parser.parse_args(argv)
    try:
        config = read_config(arguments.config)
        drafter = take_over(arguments.folder, config, arguments.out)
    except HeadraceError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("\n".join(describe(drafter)))
    print(f"begin from it: --set draft.init={arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
