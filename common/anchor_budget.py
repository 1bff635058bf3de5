"""How many blocks a batch has where the configuration says "auto": chosen once in the life of a run, kept in its directory.

The number decides what is trained, so it belongs to the run: every later life of every process, and every start of
the run in this directory, goes by the file. Whoever wants another number sets one, or removes the file.
"""

from pathlib import Path

import msgspec

from common.config import Config
from common.errors import ConfigError
from common.json_file import write_json


class BatchCost(msgspec.Struct, frozen=True):
    """What a batch takes on one drafter: seconds = `seconds` + `seconds_per_anchor` * anchors."""

    seconds: float
    seconds_per_anchor: float
    max_anchors: int  # that the device has room for


class AnchorBudget(msgspec.Struct, frozen=True):
    """The content of the file: the choice and what it was made from."""

    anchors_per_batch: int
    tokens_per_batch: float
    target_tokens_per_s: list[float]
    drafter_costs: list[BatchCost]


def budget_path(run_dir: Path) -> Path:
    """Where the choice is kept."""
    return run_dir / "anchors.json"


def write_budget(budget: AnchorBudget, run_dir: Path) -> None:
    """Keep the choice."""
    write_json(budget_path(run_dir), budget)


def read_budget(config: Config, run_dir: Path) -> AnchorBudget | None:
    """The choice; None where there is none yet, or none to make.

    Raises:
        ConfigError: the file is damaged.
    """
    path = budget_path(run_dir)
    if config.train.anchors_per_batch != "auto" or not path.exists():
        return None
    try:
        return msgspec.json.decode(path.read_bytes(), type=AnchorBudget)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: needed the anchor budget of a run, found: {error}") from error


def is_open(config: Config, run_dir: Path) -> bool:
    """Whether a budget must be chosen."""
    return config.train.anchors_per_batch == "auto" and not budget_path(run_dir).exists()
