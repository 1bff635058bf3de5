"""Whether a run may go on from the checkpoints in its directory: what makes them its own must be the same."""

from pathlib import Path

import msgspec

from common import config as configuration
from common.config import Config
from common.errors import CheckpointError
from common.run_dir import CHECKPOINTS, CONFIG

FIXED = ("model", "draft", "data", "plan", "evaluation")  # targets, drafters, ring and training settings are free
MAY_MOVE = {"draft.init"}  # its contents are compared


def check_resume(config: Config, run_dir: Path) -> None:
    """Compare with the configuration that the directory's checkpoints were made under.

    Raises:
        CheckpointError: a setting differs that decides batches, draft model or hidden states; both values are named.
    """
    if not any((run_dir / CHECKPOINTS).glob("step-????????")) or not (run_dir / CONFIG).exists():
        return  # the checkpoints name the batches and the draft model, which the drafters compare
    earlier = configuration.read(run_dir)
    _compare("seed", earlier.seed, config.seed, run_dir)
    for table in FIXED:
        before, now = msgspec.structs.asdict(getattr(earlier, table)), msgspec.structs.asdict(getattr(config, table))
        for key in before:
            if f"{table}.{key}" in MAY_MOVE:
                continue
            _compare(f"{table}.{key}", before[key], now[key], run_dir)


def _compare(key: str, before: object, now: object, run_dir: Path) -> None:
    if before != now:
        raise CheckpointError(f"{key}: needed {before}, as the checkpoints in {run_dir} have it, found {now}")
