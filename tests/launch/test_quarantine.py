"""Steps that are not finite, in real runs: skipped on all ranks alike, and what is kept of them."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.builders.launched_runs import LaunchedRun
from tests.builders.tampering import forget_checksums, freeze, poison, ready_slots, thaw


def read_quarantine(run: LaunchedRun) -> dict[str, dict[str, Any]]:
    """The files by name; NaN and Infinity are no JSON."""
    files = sorted((run.directory / "quarantine").iterdir())
    return {path.name: json.loads(path.read_text(), parse_constant=pytest.fail) for path in files}


def test_a_nan_and_an_inf_skip_their_steps_on_all_ranks(run: LaunchedRun) -> None:
    run.start('drafters.devices=["cpu", "cpu"]', "plan.epochs=4", "ring.num_slots=6")
    run.wait_for_step(2)
    frozen = freeze(run, "drafter-0", "drafter-1")
    first, _, third = ready_slots(run, at_least=3)
    for (index, slot), value in ((first, math.nan), (third, -math.inf)):
        poison(run, index, slot, value)
    sample_ids = [slot.rows.sample_ids.tolist() for _, slot in (first, third)]
    thaw(frozen)
    assert run.end() == 0, run.log_tails()
    steps = run.skipped_steps()
    assert len(steps) == 2
    assert run.skipped_steps(rank=1) == steps
    optimizer = torch.load(last_checkpoint(run) / "optimizer.pt", weights_only=True)
    assert int(optimizer["step"]) == len(run.steps()) - 2
    assert all(bool(torch.isfinite(values).all()) for values in optimizer.values())

    records = read_quarantine(run)
    assert list(records) == [f"step-{step:08}-rank{rank}.json" for step in steps for rank in (0, 1)]
    batches = [batch for record in records.values() for batch in record["batches"]]
    bad = [batch for batch in batches if batch["num_nonfinite"]]
    assert [(batch["batch"], batch["num_nonfinite"], batch["loss"]) for batch in bad] == [
        (slot.header.batch, 1, None) for _, slot in (first, third)
    ]
    assert [batch["sample_ids"] for batch in bad] == sample_ids
    assert all(0 < batch["largest_finite"] < 1e3 for batch in batches)
    assert all(batch["loss"] > 0 for batch in batches if batch not in bad)
    assert all(record["loss"] is None for record in records.values())


def test_a_gradient_that_is_not_finite_skips_its_step_where_the_loss_is(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    """A huge weight before one of zero: the forward sees nothing of it, the gradient does."""
    for folder in ("data", "checkpoints"):
        shutil.copytree(small_reference.directory / folder, run.directory / folder)
    shutil.rmtree(last_checkpoint(run))
    path = last_checkpoint(run) / "model.pt"
    weights = torch.load(path, weights_only=True)
    weights["layers.0.mlp.up_proj.weight"].fill_(1e30)
    weights["layers.0.mlp.down_proj.weight"].zero_()
    torch.save(weights, path)
    forget_checksums(path.parent)
    run.start("train.max_nonfinite_steps=100")
    assert run.end() == 0, run.log_tails()
    assert run.steps() == run.skipped_steps() != []
    records = read_quarantine(run)
    assert len(records) == len(run.steps())
    for record in records.values():
        assert record["grad_norm"] is None
        assert math.isfinite(record["loss"])
        assert [batch["num_nonfinite"] for batch in record["batches"]] == [0, 0]


def last_checkpoint(run: LaunchedRun) -> Path:
    return max((run.directory / "checkpoints").iterdir())
