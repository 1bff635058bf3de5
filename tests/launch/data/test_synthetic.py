"""Made-up data: learnable, the same for the same seed, and made once."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from common.config import Config, load
from common.data.dataset import Dataset
from common.errors import ConfigError
from launch.data.synthetic import CYCLE_LENGTH, write_synthetic

TINY = Path("launch/configs/tiny.toml")


def make(folder: Path, *overrides: str) -> tuple[Config, Dataset, Dataset]:
    config = load(TINY, list(overrides))
    write_synthetic(config, folder)
    return config, Dataset.open(folder / "train"), Dataset.open(folder / "eval")


def read_successors(dataset: Dataset) -> dict[int, set[int]]:
    successors: dict[int, set[int]] = {}
    for sample_id in range(dataset.num_samples):
        ids = dataset.read(sample_id).input_ids.tolist()
        for token, following in itertools.pairwise(ids):
            successors.setdefault(token, set()).add(following)
    return successors


def test_the_configured_numbers_and_lengths_come_out(tmp_path: Path) -> None:
    settings = ["min_length=3", "max_length=9", "num_samples=200", "num_eval_samples=50"]
    config, train, held_out = make(tmp_path, *[f"data.synthetic.{setting}" for setting in settings])
    assert (train.num_samples, held_out.num_samples) == (200, 50)
    assert set(train.lengths.tolist()) == set(range(3, 10))
    for dataset in (train, held_out):
        for sample_id in range(dataset.num_samples):
            sample = dataset.read(sample_id)
            length = len(sample.input_ids)
            assert sample.loss_mask.tolist() == [index >= length // 4 for index in range(length)]
            assert sample.input_ids.min() >= 0
            assert sample.input_ids.max() < config.shape.vocab_size
            assert config.draft.mask_token_id not in sample.input_ids


def test_every_token_decides_the_next_in_both_sets_alike(tmp_path: Path) -> None:
    _, train, held_out = make(tmp_path)
    learned = read_successors(train)
    assert len(learned) > 2 * CYCLE_LENGTH
    assert all(len(following) == 1 for following in learned.values())
    assert read_successors(held_out).items() <= learned.items()


def test_the_mask_id_is_left_out_whichever_it_is(tmp_path: Path) -> None:
    _, train, _ = make(tmp_path, "draft.mask_token_id=0")
    used = np.concatenate([train.read(sample_id).input_ids for sample_id in range(train.num_samples)])
    assert 0 not in used


def test_the_seed_decides_all(tmp_path: Path) -> None:
    _, first, first_eval = make(tmp_path / "a")
    _, again, again_eval = make(tmp_path / "b")
    _, other, _ = make(tmp_path / "c", "seed=1")
    assert (first.fingerprint, first_eval.fingerprint) == (again.fingerprint, again_eval.fingerprint)
    assert len({first.fingerprint, first_eval.fingerprint, other.fingerprint}) == 3


def test_what_is_there_is_kept_and_what_was_made_otherwise_is_replaced(tmp_path: Path) -> None:
    _, train, _ = make(tmp_path)
    path = tmp_path / "train" / "manifest.json"
    before = path.stat()
    make(tmp_path)
    assert path.stat() == before
    _, replaced, _ = make(tmp_path, "seed=1")
    assert replaced.fingerprint != train.fingerprint


def test_a_damaged_set_is_made_again(tmp_path: Path) -> None:
    _, train, _ = make(tmp_path)
    (tmp_path / "train" / "data-00000.arrow").unlink()
    assert make(tmp_path)[1].fingerprint == train.fingerprint


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.synthetic.min_length=1", r"data\.synthetic\.min_length: needed at least 2, found 1"),
        (
            "data.synthetic.min_length=65",
            r"data\.synthetic\.min_length: needed at most data\.synthetic\.max_length 64, found 65",
        ),
        ("data.synthetic.num_samples=0", r"data\.synthetic\.num_samples: needed at least 1, found 0"),
        ("data.synthetic.num_eval_samples=0", r"data\.synthetic\.num_eval_samples: needed at least 1, found 0"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tmp_path, override)
    assert list(tmp_path.iterdir()) == []
