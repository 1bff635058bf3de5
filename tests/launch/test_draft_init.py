"""A run that begins from somebody else's drafter is as good as that was; one that does not fit ends the run."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from common import config as configuration
from services.drafter.folder.export import export
from services.drafter.model.model import DraftModel
from tests.builders.launched_runs import CONFIG, LaunchedRun

TORCHSPEC_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}


def make_torchspec(folder: Path) -> None:
    """An export under the names and keys of TorchSpec, with the target's embedding beside it."""
    content = json.loads((folder / "config.json").read_text())
    own = content.pop("dflash_config")
    content |= {"num_target_layers": 2, "target_num_hidden_layers": content["num_target_layers"], **own}
    del content["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {TORCHSPEC_NAMES.get(name, name): weight for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"embed_tokens.weight": torch.zeros(64, 32)}, folder / "model.safetensors")


EXACT = ("draft.dtype=bfloat16", "plan.epochs=6")  # in bfloat16 an export holds the very weights of the last step


def test_a_run_begins_where_another_ended(tmp_path: Path, run: LaunchedRun) -> None:
    run.start(*EXACT)
    assert run.end() == 0, run.log_tails()
    theirs = shutil.copytree(run.directory / "export", tmp_path / "theirs")
    make_torchspec(theirs)
    second = LaunchedRun(tmp_path / "second").start(*EXACT, f"draft.init={theirs}", 'drafters.devices=["cpu", "cpu"]')
    try:
        assert second.end() == 0, second.log_tails()
        before, after = run.evaluations(), second.evaluations()
        assert after[0] == before[max(before)] > before[0] + 0.1
        assert f"begins from {theirs} (torchspec layout)" in second.log("drafter-0")
        weights = load_file(theirs / "model.safetensors")
        save_file({name: weight + 1 for name, weight in weights.items()}, theirs / "model.safetensors")
        assert second.start(*EXACT, f"draft.init={theirs}").end() == 2
        assert "draft.init_fingerprint: needed" in second.stderr
        assert second.start(*EXACT).end() == 2  # without it, it is another run
        assert "draft.init_fingerprint: needed" in second.stderr
        assert second.start(*EXACT, f"draft.init={tmp_path}/nowhere").end() == 2
        assert second.stderr == f"error: {tmp_path}/nowhere: needed a drafter folder, found no config.json\n"
    finally:
        second.kill_what_is_left()


def test_a_drafter_that_does_not_fit_ends_the_run_in_one_line(tmp_path: Path, run: LaunchedRun) -> None:
    config = configuration.load(CONFIG, ["draft.block_size=8"])
    export(tmp_path / "theirs", config, DraftModel(config).state_dict(), 1, None)
    assert run.start(f"draft.init={tmp_path}/theirs").end() == 2
    assert run.stderr.count("\n") == 1
    assert "block_size: needed 4, found 8" in run.stderr


def test_weights_that_are_no_numbers_end_the_run_in_one_line(tmp_path: Path, run: LaunchedRun) -> None:
    config = configuration.load(CONFIG, [])
    export(tmp_path / "theirs", config, DraftModel(config).state_dict(), 1, None)
    path = tmp_path / "theirs/model.safetensors"
    save_file(load_file(path) | {"norm.weight": torch.full([config.shape.hidden_size], torch.nan)}, path)
    assert run.start(f"draft.init={tmp_path}/theirs").end() == 2
    assert run.stderr.count("\n") == 1
    assert f"tensor norm.weight: needed finite numbers, found {config.shape.hidden_size} others" in run.stderr
