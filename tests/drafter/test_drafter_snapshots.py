"""What a rank takes over from disk and leaves there, also where the disk refuses."""

import logging
from pathlib import Path

import pytest
import torch
from made_up_batches import make_config

from common.config import Config
from common.errors import CheckpointError
from services.drafter.model import DraftModel
from services.drafter.optimizer import MasterAdamW
from services.drafter.snapshots import Snapshots

PLAN_HASH = b"p" * 16


def make_model(config: Config, fill: float) -> tuple[DraftModel, MasterAdamW]:
    """All weights the same, all moments zero."""
    model = DraftModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return model, MasterAdamW(model, config.train, num_steps=10, num_sums=2)


def test_a_rank_takes_over_what_rank_0_saved(tmp_path: Path) -> None:
    config = make_config()
    saved = Snapshots(tmp_path, config, PLAN_HASH, rank=0)
    saved.acceptance = 1.5
    saved.save(*make_model(config, 0.25), step=4, next_batch=24, required=True)
    model, optimizer = make_model(config, 0.5)
    taken_over = Snapshots(tmp_path, config, PLAN_HASH, rank=1)
    assert taken_over.resume(model, optimizer) == 24
    assert taken_over.acceptance == 1.5
    assert bool((optimizer.master == 0.25).all())
    assert all(bool((parameter == 0.25).all()) for parameter in model.parameters())


def test_without_a_checkpoint_a_run_starts_at_its_first_batch(tmp_path: Path) -> None:
    config = make_config()
    model, optimizer = make_model(config, 0.5)
    assert Snapshots(tmp_path, config, PLAN_HASH, rank=0).resume(model, optimizer) == 0
    assert bool((optimizer.master == 0.5).all())


def test_only_rank_0_writes(tmp_path: Path) -> None:
    config = make_config()
    snapshots = Snapshots(tmp_path, config, PLAN_HASH, rank=1)
    model, optimizer = make_model(config, 0.5)
    snapshots.save(model, optimizer, step=4, next_batch=24, required=True)
    snapshots.export(model, optimizer)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_refuses_ends_the_run_only_where_the_checkpoint_is_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config()
    (tmp_path / "checkpoints").write_text("in the way")
    snapshots = Snapshots(tmp_path, config, PLAN_HASH, rank=0)
    model, optimizer = make_model(config, 0.5)
    with caplog.at_level(logging.ERROR):
        snapshots.save(model, optimizer, step=4, next_batch=24, required=False)
    assert "not written" in caplog.text
    assert "the run goes on without this checkpoint" in caplog.text
    with pytest.raises(CheckpointError, match="not written"):
        snapshots.save(model, optimizer, step=4, next_batch=24, required=True)


def test_a_checkpoint_of_another_plan_is_not_taken_over(tmp_path: Path) -> None:
    config = make_config()
    Snapshots(tmp_path, config, PLAN_HASH, rank=0).save(*make_model(config, 0.25), step=4, next_batch=24, required=True)
    model, optimizer = make_model(config, 0.5)
    with pytest.raises(CheckpointError, match="of another batch plan"):
        Snapshots(tmp_path, config, b"q" * 16, rank=0).resume(model, optimizer)
    assert bool((optimizer.master == 0.5).all())
