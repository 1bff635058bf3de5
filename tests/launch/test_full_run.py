"""Whole runs: what they leave on disk and on the machine, and that the same seed gives the same bits."""

import json
import math
import re
import socket

import pytest
from safetensors.torch import load_file

from tests.builders.launched_runs import LaunchedRun

ACTORS = ["exchange", "target-0", "target-1", "drafter-0", "drafter-1"]


def test_run_reports_every_step_once_on_every_rank(reference: LaunchedRun) -> None:
    steps = reference.steps()
    assert len(steps) > 40
    assert steps == list(range(1, len(steps) + 1))
    assert reference.steps(rank=1) == steps
    assert reference.losses(rank=1) == reference.losses()
    assert all(math.isfinite(loss) for loss in reference.losses().values())


def test_held_out_acceptance_is_higher_than_before_training(reference: LaunchedRun) -> None:
    evaluations = reference.evaluations()
    assert list(evaluations) == [0, 24, 48, len(reference.steps())]
    assert evaluations[0] < 1.1
    assert evaluations[len(reference.steps())] > 1.4
    assert f"{evaluations[0]:.3f} before, {evaluations[len(reference.steps())]:.3f} after training" in reference.stdout


def test_export_loads(reference: LaunchedRun) -> None:
    weights = load_file(reference.directory / "export" / "model.safetensors")
    assert len(weights) == 3 + 2 * 11  # fc, two norms, and eleven per layer
    assert all(bool(tensor.isfinite().all()) for tensor in weights.values())
    config = json.loads((reference.directory / "export" / "config.json").read_text())
    assert config["dflash_config"]["target_layer_ids"] == [1, 2]
    assert f"exported drafter                       {reference.directory / 'export'}" in reference.stdout


@pytest.mark.parametrize("name", ACTORS)
def test_log_has_a_header_line_per_incarnation(reference: LaunchedRun, name: str) -> None:
    header = re.compile(rf"\S+ \S+ I ---- {name} started, pid \d+ ----")
    assert header.fullmatch(reference.log(name).splitlines()[0])
    assert reference.num_incarnations(name) == 1


def test_run_leaves_nothing_but_its_directory(reference: LaunchedRun) -> None:
    assert reference.pids() == []
    assert reference.directory.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as connection, pytest.raises(ConnectionRefusedError):
        connection.connect(str(reference.directory / "exchange.sock"))
    assert reference.stderr == ""


def test_losses_do_not_depend_on_number_of_targets_or_on_layout(reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start('drafters.devices=["cpu", "cpu"]', "ring.layout=split")
    assert run.end() == 0, run.log_tails()
    assert run.losses() == reference.losses()
    assert run.evaluations() == reference.evaluations()
    assert run.weights() == reference.weights()


def test_another_seed_gives_other_losses(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start("seed=1", "plan.epochs=1")
    assert run.end() == 0, run.log_tails()
    losses = run.losses()
    assert losses
    assert all(loss != small_reference.losses()[step] for step, loss in losses.items())
