"""Loading and saving by a rank, also with damaged files and disk errors."""

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from common.acceptance import Evaluation
from common.actor.messages import Welcome
from common.config import Config
from common.drafter_files import fingerprint_drafter
from common.errors import CheckpointError
from services.drafter.folder.checkpoint import checkpoint_folder, read_checkpoint
from services.drafter.folder.export import export
from services.drafter.model.model import DraftModel
from services.drafter.training.optimizer import MasterAdamW
from services.drafter.training.resume import Checkpointer
from services.drafter.training.run_state import RunState
from tests.builders.batches import make_config, make_evaluation

WELCOME = Welcome(b"p" * 16, num_batches=240, num_steps=40)


def make_optimizer(config: Config, fill: float) -> MasterAdamW:
    """Make an optimizer whose weights are all equal and whose moments are zero."""
    model = DraftModel(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(fill)
    return MasterAdamW(model, config.train, num_steps=10, block_size=1)


def run_at(position: int, evaluation: Evaluation | None = None) -> RunState:
    run = RunState(torch.zeros(2, 4, dtype=torch.int64), lambda rounds, step: make_evaluation(step, 1.5))
    run.resume(position, evaluation)
    return run


def test_a_rank_loads_the_checkpoint_of_rank_0(tmp_path: Path) -> None:
    config = make_config()
    saved = Checkpointer(tmp_path, config, WELCOME, rank=0)
    saved.save(make_optimizer(config, 0.25), run_at(24, make_evaluation(4, 1.5)), step=4, required=True)
    optimizer = make_optimizer(config, 0.5)
    taken_over = Checkpointer(tmp_path, config, WELCOME, rank=1)
    assert taken_over.resume(optimizer) == (24, make_evaluation(4, 1.5))
    assert bool((optimizer.master == 0.25).all())
    assert bool((optimizer.weights == 0.25).all())


def test_a_checkpoint_knows_the_acceptance_of_its_own_weights_only(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, make_config(), WELCOME, rank=0)
    for step in (4, 8):
        checkpointer.save(make_optimizer(make_config(), 0.25), run_at(6 * step, make_evaluation(4, 1.5)), step, required=True)
    found = [read_checkpoint(checkpoint_folder(tmp_path, step)).evaluation for step in (4, 8)]
    assert found == [make_evaluation(4, 1.5), None]


def test_an_evaluation_is_worth_a_checkpoint_if_it_is_the_best_or_has_one(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, make_config(), WELCOME, rank=0)
    for step, acceptance, worth in [(0, 1.1, False), (3, 1.5, True), (6, 1.5, False), (9, 1.4, False), (12, 1.6, True)]:
        evaluation = make_evaluation(step, acceptance)
        assert checkpointer.is_worth_keeping(evaluation) is worth
        if worth:
            checkpointer.save(make_optimizer(make_config(), 0.25), run_at(step, evaluation), step, required=False)
            assert checkpointer.is_worth_keeping(evaluation)  # its record may learn more


def test_a_run_begins_from_the_float32_weights_of_draft_init(tmp_path: Path) -> None:
    config = make_config(dtype="bfloat16")
    weights = {name: torch.randn_like(weight.float()) for name, weight in DraftModel(config).state_dict().items()}
    export(tmp_path / "drafter", config, weights, step=1, evaluation=None)
    save_file(weights, tmp_path / "drafter" / "model.safetensors")  # finer than an export's
    started = with_init(config, tmp_path / "drafter")
    optimizer = make_optimizer(config, 0.5)
    assert Checkpointer(tmp_path, started, WELCOME, rank=0).resume(optimizer) == (0, None)
    assert all(torch.equal(master, weights[name]) for name, master in optimizer.master_weights().items())
    assert torch.equal(optimizer.weights, optimizer.master.bfloat16())
    assert not optimizer.exp_avg.any()

    other = msgspec.structs.replace(started, draft=msgspec.structs.replace(started.draft, init_fingerprint="0" * 64))
    with pytest.raises(CheckpointError, match=r"draft\.init: .* needed the contents 000000000000, found"):
        Checkpointer(tmp_path, other, WELCOME, rank=0).resume(optimizer)
    other = with_init(make_config(sliding_window=9), tmp_path / "drafter")
    with pytest.raises(CheckpointError, match="sliding_window: needed 9, found 5"):
        Checkpointer(tmp_path, other, WELCOME, rank=0).resume(optimizer)

    Checkpointer(tmp_path, started, WELCOME, rank=0).save(make_optimizer(config, 0.25), run_at(24), step=4, required=True)
    assert Checkpointer(tmp_path, started, WELCOME, rank=0).resume(optimizer) == (24, None)  # a checkpoint goes before
    assert bool((optimizer.master == 0.25).all())


def with_init(config: Config, folder: Path) -> Config:
    draft = msgspec.structs.replace(config.draft, init=str(folder), init_fingerprint=fingerprint_drafter(folder))
    return msgspec.structs.replace(config, draft=draft)


def test_without_a_checkpoint_a_run_starts_at_its_first_batch(tmp_path: Path) -> None:
    config = make_config()
    optimizer = make_optimizer(config, 0.5)
    assert Checkpointer(tmp_path, config, WELCOME, rank=0).resume(optimizer) == (0, None)
    assert bool((optimizer.master == 0.5).all())


def test_only_rank_0_writes(tmp_path: Path) -> None:
    config = make_config()
    checkpointer = Checkpointer(tmp_path, config, WELCOME, rank=1)
    optimizer = make_optimizer(config, 0.5)
    checkpointer.save(optimizer, run_at(24), step=4, required=True)
    checkpointer.export(optimizer, run_at(24))
    assert list(tmp_path.iterdir()) == []


def test_a_disk_error_ends_the_run_only_if_the_checkpoint_is_required(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config()
    (tmp_path / "checkpoints").write_text("in the way")
    checkpointer = Checkpointer(tmp_path, config, WELCOME, rank=0)
    optimizer = make_optimizer(config, 0.5)
    with caplog.at_level(logging.ERROR):
        checkpointer.save(optimizer, run_at(24), step=4, required=False)
    assert "not written" in caplog.text
    assert "the run goes on without this checkpoint" in caplog.text
    with pytest.raises(CheckpointError, match="not written"):
        checkpointer.save(optimizer, run_at(24), step=4, required=True)


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    config = make_config()
    Checkpointer(tmp_path, config, WELCOME, rank=0).save(make_optimizer(config, 0.25), run_at(24), step=4, required=True)
    optimizer = make_optimizer(config, 0.5)
    with pytest.raises(CheckpointError, match="of another batch plan"):
        Checkpointer(tmp_path, config, Welcome(b"q" * 16, 240, 40), rank=0).resume(optimizer)
    assert bool((optimizer.master == 0.5).all())


PAIRS = msgspec.structs.replace(make_config(), plan=msgspec.structs.replace(make_config().plan, batches_per_step=2))
CHECKSUMS = ("files", "sha256")


class RunsACommand:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def write_record(folder: Path, **changes: int) -> None:
    """Rewrite the record without checksums, like an old checkpoint."""
    content = json.loads((folder / "checkpoint.json").read_text()) | changes
    (folder / "checkpoint.json").write_text(
        json.dumps({key: content[key] for key in content if key not in ("files", "sha256")})
    )


def save_two(run_dir: Path) -> list[Path]:
    """Save steps 4 and 8 with different weights, without checksums."""
    checkpointer = Checkpointer(run_dir, PAIRS, WELCOME, rank=0)
    for step in (4, 8):
        checkpointer.save(make_optimizer(PAIRS, step / 16), run_at(6 * step), step=step, required=True)
    folders = [checkpoint_folder(run_dir, step) for step in (4, 8)]
    for folder in folders:
        write_record(folder)
    return folders


def spoil(folder: Path, how: str, mark: Path) -> None:
    weights = torch.load(folder / "model.pt")
    match how:
        case "missing tensor":
            del weights["fc.weight"]
        case "another shape":
            weights["fc.weight"] = weights["fc.weight"].T.contiguous()
        case "no tensors":
            weights = [1]
        case "command":
            weights = {"fc.weight": RunsACommand(mark)}
        case "no file":
            (folder / "optimizer.pt").unlink()
        case _:
            key, _, value = how.partition("=")
            write_record(folder, **{key: int(value)})
    torch.save(weights, folder / "model.pt")


KINDS = {
    "missing tensor": r"weight fc\.weight: needed shape \(.*\), found none",
    "another shape": r"weight fc\.weight: needed shape \(.*\), found \(.*\)",
    "no tensors": "needed tensors by name, found list",
    "command": r"model\.pt: cannot be read: Weights only load failed",
    "no file": r"optimizer\.pt: cannot be read: No such file or directory",
    "next_batch=49": "next_batch: needed a multiple of 2 from 0 to 240, found 49",
    "next_batch=-2": "next_batch: needed .*, found -2",
    "next_batch=242": "next_batch: needed .*, found 242",
    "next_batch=240": "step: needed at most 40, found 8 at batch 240",
    "step=41": "step: needed at most 40, found 41",
}


@pytest.mark.parametrize("how", KINDS)
def test_the_newest_intact_checkpoint_is_loaded_and_the_damaged_one_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    older, newer = save_two(tmp_path)
    spoil(newer, how, tmp_path / "ran")
    optimizer = make_optimizer(PAIRS, 0.5)
    for rank in (1, 0):
        assert Checkpointer(tmp_path, PAIRS, WELCOME, rank=rank).resume(optimizer) == (24, None)
        assert bool((optimizer.master == 0.25).all())
    assert str(newer) in caplog.text
    assert sorted(path.name for path in older.parent.iterdir()) == [older.name, f"{newer.name}.damaged"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("how", KINDS)
def test_without_an_intact_checkpoint_the_run_ends_and_no_folder_is_renamed(tmp_path: Path, how: str) -> None:
    folders = save_two(tmp_path)
    for folder in folders:
        spoil(folder, how, tmp_path / "ran")
    found = f"^needed an intact checkpoint, found none among 2: {folders[1]}.*{KINDS[how]}"
    with pytest.raises(CheckpointError, match=found) as caught:
        Checkpointer(tmp_path, PAIRS, WELCOME, rank=0).resume(make_optimizer(PAIRS, 0.5))
    assert "\n" not in str(caught.value)
    assert sorted(folders[0].parent.iterdir()) == folders
    assert not (tmp_path / "ran").exists()


def test_a_checkpoint_without_checksums_is_loaded_unchecked(tmp_path: Path) -> None:
    save_two(tmp_path)
    optimizer = make_optimizer(PAIRS, 0.75)
    assert Checkpointer(tmp_path, PAIRS, WELCOME, rank=0).resume(optimizer) == (48, None)
    assert bool((optimizer.master == 0.5).all())
