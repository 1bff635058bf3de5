"""The reference of the settings follows common/config.py."""

import subprocess
import sys
from pathlib import Path

from common.config import Config, TargetsConfig
from launch.settings import reference

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "launch" / "configs" / "SETTINGS.md"


def test_the_committed_reference_is_what_the_command_prints() -> None:
    done = subprocess.run([sys.executable, "-m", "launch.settings"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert SETTINGS.read_text() == done.stdout


def test_a_row_has_type_bounds_default_and_meaning() -> None:
    rows = reference().splitlines()
    assert "| `train.warmup_ratio` | a number, at least 0 and at most 1 | `0.04` | share of the steps in which" in "".join(rows)
    assert "| `targets.compile` | true or false | `false` | each decoder layer, with torch.compile" in "".join(rows)


def test_every_key_that_a_person_sets_has_a_row() -> None:
    keys = [line.split("`")[1] for line in reference().splitlines() if line.startswith("| `")]
    assert len(keys) == len(set(keys))
    assert {f"targets.{name}" for name in TargetsConfig.__struct_fields__} <= set(keys)
    assert {key.split(".")[0] for key in keys} == set(Config.__struct_fields__) - {"target_shape"}
    assert "data.synthetic.num_samples" in keys and "draft.init_fingerprint" not in keys
