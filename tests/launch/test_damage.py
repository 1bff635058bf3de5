"""Prepared data in a real run: the table of its plan, and damage that ends the run with file and rows named."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from common import config as configuration
from common.data.dataset import Dataset
from launch.data.writer import DatasetWriter
from tests.builders.launched_runs import CONFIG, LaunchedRun
from tests.builders.saved_sets import save_set

NUM_ROWS = 32
SETTINGS = ("plan.epochs=2", 'targets.devices=["cpu"]', 'drafters.devices=["cpu"]', "checkpoint.every_steps=100")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The tiny configuration with a prepared set of four files; row n starts with the ids 2, 3, n."""
    with DatasetWriter(tmp_path / "train", {}, rows_per_file=8) as writer:
        for row in range(NUM_ROWS):
            ids = np.concatenate([[2, 3, row], np.arange(13 + row % 3) % 8 + 40])
            writer.add(ids, np.arange(len(ids)) >= 4)
    text = re.sub(r"\[data\.synthetic\].*?\n\n", f'[data]\npath = "{tmp_path}/train"\n\n', CONFIG.read_text(), flags=re.DOTALL)
    (tmp_path / "damaged.toml").write_text(text)
    return tmp_path / "damaged.toml"


def damage_row(folder: Path, row: int) -> None:
    """Flip one bit of its third token."""
    path = folder / f"data-{row // 8:05}.arrow"
    content = bytearray(path.read_bytes())
    content[content.index(np.array([2, 3, row], np.int32).tobytes()) + 8] ^= 1
    path.write_bytes(bytes(content))


def test_the_table_of_the_plan_is_printed_at_the_start(config: Path, run: LaunchedRun) -> None:
    assert run.start(*SETTINGS, config=config).end() == 0, run.log_tails()
    assert "samples            32; 0 held out\n" in run.stdout
    assert re.search(r"^batches per epoch  \d+ of \d to 8, on average \d\.\d, samples$", run.stdout, re.MULTILINE)
    assert re.search(r"^ +17-32 +21 +3 +\d+\.\d% +5 +8 +7\.0$", run.stdout, re.MULTILINE), run.stdout


def test_a_flipped_byte_ends_the_run_with_its_row_named(config: Path, run: LaunchedRun) -> None:
    damage_row(config.parent / "train", 21)
    assert run.start(*SETTINGS, config=config).end() == 2, run.log_tails()
    message = r"error: target-0: \S*data-00002\.arrow \(rows 16 to 23\): sample 21: its checksum is wrong: .*\n"
    assert re.fullmatch(message, run.stderr), run.stderr
    assert run.pids() == []


def test_a_file_cut_short_is_refused_before_anything_starts(config: Path, run: LaunchedRun) -> None:
    path = config.parent / "train" / "data-00003.arrow"
    path.write_bytes(path.read_bytes()[:-100])
    assert run.start(*SETTINGS, config=config).end() == 2
    assert re.fullmatch(r"error: \S*data-00003\.arrow \(rows 24 to 31\): needed \d+ bytes, found \d+\n", run.stderr)
    assert not run.directory.exists()


def test_a_set_saved_by_hugging_face_is_trained_on_as_it_is(config: Path, run: LaunchedRun, tmp_path: Path) -> None:
    dataset = Dataset.open(config.parent / "train")
    samples = [dataset.read(row) for row in range(NUM_ROWS)]
    save_set(tmp_path / "saved", [(sample.input_ids.tolist(), sample.loss_mask.tolist()) for sample in samples])
    assert run.start(*SETTINGS, f"data.path={tmp_path}/saved", config=config).end() == 0, run.log_tails()
    plain = LaunchedRun(tmp_path / "plain")
    assert plain.start(*SETTINGS, config=config).end() == 0, plain.log_tails()
    assert "supervised         not counted" in run.stdout
    assert run.losses() == plain.losses() and len(run.losses()) >= 3


def test_the_configuration_of_an_earlier_version_is_read(config: Path, tmp_path: Path) -> None:
    """Its key `data.skip_damaged` is gone."""
    loaded = configuration.load(config, [])
    configuration.write(loaded, tmp_path)
    path = tmp_path / "config.json"
    tree = json.loads(path.read_text())
    tree["data"]["skip_damaged"] = False
    path.write_text(json.dumps(tree))
    assert configuration.read(tmp_path) == loaded
