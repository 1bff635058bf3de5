"""Checkpoints: bit for bit, whole or absent, refused when they belong to another run."""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import torch

from common.acceptance import find_best
from common.errors import CheckpointError, DamagedCheckpointError
from services.drafter.folder.checkpoint import (
    Checkpoint,
    DraftIdentity,
    checkpoint_folder,
    clean,
    latest,
    load,
    load_weights,
    save,
)
from tests.builders.batches import make_evaluation

ROOT = Path(__file__).parents[4]
DRAFT = DraftIdentity(
    block_size=4,
    mask_token_id=63,
    tap_layers=[0, 2],
    layer_types=["full_attention"],
    sliding_window=0,
    hidden_size=8,
    intermediate_size=8,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
)
SAVER = """
import pathlib, sys, time
import msgspec, torch
from services.drafter.folder.checkpoint import Checkpoint, save

class StopsInTheMiddle:
    def __reduce__(self):
        print("in the middle", flush=True)
        time.sleep(600)

run_dir, record, stop_at = pathlib.Path(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Checkpoint), int(sys.argv[3])
for step in range(1, 1000000):
    weights = {"fc.weight": torch.full((256, 64), float(step))}
    optimizer = {"exp_avg": weights["fc.weight"], "end": StopsInTheMiddle() if step == stop_at else 0}
    save(run_dir, msgspec.structs.replace(record, step=step), weights, optimizer, keep=2)
    print(step, flush=True)
"""


def checkpoint(step: int, plan_hash: str = "aa") -> Checkpoint:
    return Checkpoint(step=step, next_batch=2 * step, plan_hash=plan_hash, draft=DRAFT)


def without_checksums(record: Checkpoint) -> Checkpoint:
    return msgspec.structs.replace(record, files={}, sha256="")


def save_step(run_dir: Path, step: int, keep: int = 9, size: int = 4) -> Path:
    return save(run_dir, checkpoint(step), {"fc.weight": torch.full((size,), float(step))}, {"step": step}, keep)


@contextmanager
def saver(run_dir: Path, stop_at: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process that saves checkpoint after checkpoint, and stops inside one of them; killed on exit."""
    record = msgspec.json.encode(checkpoint(0)).decode()
    command = [sys.executable, "-c", SAVER, str(run_dir), record, str(stop_at)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    assert line in (output.strip() for output in process.stdout)


def test_round_trip_is_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(64, 8, generator=generator))
    optimizer = torch.optim.AdamW([parameter], lr=1e-3)
    for _ in range(3):
        parameter.grad = torch.randn(64, 8, generator=generator)
        optimizer.step()
    folder = save(tmp_path, checkpoint(3), {"fc.weight": parameter.detach()}, optimizer.state_dict(), keep=1)
    record, weights, state = load(folder, DRAFT, "aa")

    resumed_parameter = torch.nn.Parameter(weights["fc.weight"])
    resumed = torch.optim.AdamW([resumed_parameter], lr=1.0)
    resumed.load_state_dict(state)
    gradient = torch.randn(64, 8, generator=generator)
    for trained, trainer in ((parameter, optimizer), (resumed_parameter, resumed)):
        trained.grad = gradient.clone()
        trainer.step()
    assert without_checksums(record) == checkpoint(3)
    assert torch.equal(resumed_parameter, parameter)


def test_latest_is_the_newest_and_keep_counts(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    for step in (1, 2, 10, 9999):
        save_step(tmp_path, step, keep=2)
    assert latest(tmp_path) == checkpoint_folder(tmp_path, 9999)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-00000010", "step-00009999"]


def test_the_best_stays_whatever_its_age(tmp_path: Path) -> None:
    acceptances = {1: 1.2, 2: 1.5, 3: None, 4: 1.5, 5: 1.4, 6: None}
    for step, acceptance in acceptances.items():
        record = msgspec.structs.replace(checkpoint(step), evaluation=make_evaluation(step, acceptance) if acceptance else None)
        save(tmp_path, record, {}, {}, keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [f"step-{step:08d}" for step in (2, 5, 6)]
    aside = tmp_path / "checkpoints" / "step-00000009.partial"
    aside.mkdir()
    (aside / "checkpoint.json").write_bytes(msgspec.json.encode({"evaluation": make_evaluation(9, 1.9)}))
    best = find_best(tmp_path)
    assert best == make_evaluation(2, 1.5)  # the first of equals
    save(tmp_path, msgspec.structs.replace(checkpoint(7), evaluation=make_evaluation(7, 1.6)), {}, {}, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000007"]


def test_a_record_without_acceptance_and_checksums_is_read(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 5)
    content = json.loads((folder / "checkpoint.json").read_text()) | {"metrics": {"acceptance": 1.5}}
    for key in ("evaluation", "files", "sha256"):
        del content[key]
    (folder / "checkpoint.json").write_text(json.dumps(content))
    assert load(folder, DRAFT, "aa")[0] == checkpoint(5)
    assert find_best(tmp_path) is None


def test_saving_the_same_step_again_moves_the_cursor(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 5)
    later = msgspec.structs.replace(checkpoint(5), next_batch=99, evaluation=make_evaluation(5, 2.0))
    assert save(tmp_path, later, {}, {}, keep=1) == folder
    record, weights, optimizer = load(folder, DRAFT, "aa")
    assert without_checksums(record) == later
    assert torch.equal(weights["fc.weight"], torch.full((4,), 5.0))
    assert optimizer == {"step": 5}
    save(tmp_path, checkpoint(5), {}, {}, keep=1)
    moved = without_checksums(load(folder, DRAFT, "aa")[0])
    assert moved == msgspec.structs.replace(later, next_batch=10)  # what was measured stays
    with pytest.raises(CheckpointError, match="plan hash: needed bb, found aa"):
        save(tmp_path, checkpoint(5, "bb"), {}, {}, keep=1)
    (folder / "checkpoint.json.partial").write_text("{")  # as a kill in the middle leaves it
    clean(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint.json", "model.pt", "optimizer.pt"]


@pytest.mark.parametrize("stop_at", [1, 2, 4])
def test_kill_in_the_middle_of_a_save(tmp_path: Path, stop_at: int) -> None:
    with saver(tmp_path, stop_at) as process:
        read_until(process, "in the middle")
        process.kill()
        process.wait()
    leftover = checkpoint_folder(tmp_path, stop_at).with_name(f"step-{stop_at:08d}.partial")
    assert (leftover / "model.pt").exists()  # it was killed in the middle
    assert latest(tmp_path) == (checkpoint_folder(tmp_path, stop_at - 1) if stop_at > 1 else None)
    clean(tmp_path)
    assert not leftover.exists()
    assert len(list((tmp_path / "checkpoints").iterdir())) == min(stop_at - 1, 2)


def test_kill_at_any_moment_leaves_whole_checkpoints(tmp_path: Path) -> None:
    with saver(tmp_path, stop_at=0) as process:
        read_until(process, "3")
        process.kill()
        process.wait()
    newest = latest(tmp_path)
    assert newest is not None
    record, weights, optimizer = load(newest, DRAFT, "aa")
    assert record.step >= 3
    assert torch.equal(weights["fc.weight"], torch.full((256, 64), float(record.step)))
    assert torch.equal(optimizer["exp_avg"], weights["fc.weight"])
    save(tmp_path, checkpoint(record.step + 100), weights, {}, keep=1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step-{record.step + 100:08d}"]


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step-00000002: not written: File too large; \d+ bytes are free in"):
            save_step(tmp_path, 2, keep=1, size=1_000_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert load(checkpoint_folder(tmp_path, 1), DRAFT, "aa")[0].step == 1


def test_another_plan_or_draft_is_refused_with_both_values(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 1)
    with pytest.raises(CheckpointError, match="plan hash: needed bb, found aa"):
        load(folder, DRAFT, "bb")
    others = {"block_size": 8, "mask_token_id": 1, "tap_layers": [1], "head_dim": 16, "rope_theta": 1e6}
    for field, value in others.items():
        other = msgspec.structs.replace(DRAFT, **{field: value})
        with pytest.raises(CheckpointError) as caught:
            load_weights(folder, other)
        assert f"{field}: needed {value}, found {getattr(DRAFT, field)}" in str(caught.value)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 1)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        load(checkpoint_folder(tmp_path, 7), DRAFT, "aa")
    (folder / "model.pt").write_bytes((folder / "model.pt").read_bytes()[:100])
    with pytest.raises(DamagedCheckpointError, match=r"model\.pt: needed SHA-256 [0-9a-f]{12}, found [0-9a-f]{12}$"):
        load(folder, DRAFT, "aa")
    (folder / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        load(folder, DRAFT, "aa")


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "checkpoint.json"])
def test_one_flipped_bit_anywhere_is_noticed(tmp_path: Path, name: str) -> None:
    record = msgspec.structs.replace(checkpoint(1), evaluation=make_evaluation(1, 1.5))
    path = save(tmp_path, record, {"fc.weight": torch.ones(4)}, {"step": 1}, keep=1) / name
    content = path.read_bytes()
    for offset in range(0, len(content), 1 if name == "checkpoint.json" else 7):
        path.write_bytes(content[:offset] + bytes([content[offset] ^ 1]) + content[offset + 1 :])
        with pytest.raises(DamagedCheckpointError, match=re.escape(f"{path}: ")):
            load(path.parent, DRAFT, "aa")
        assert name != "checkpoint.json" or find_best(tmp_path) is None
    path.write_bytes(content)
    assert without_checksums(load(path.parent, DRAFT, "aa")[0]) == record


def test_a_damaged_checkpoint_of_the_step_is_replaced(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 5)
    (folder / "checkpoint.json").write_bytes(b"{")
    assert save_step(tmp_path, 5) == folder
    assert torch.equal(load(folder, DRAFT, "aa")[1]["fc.weight"], torch.full((4,), 5.0))
