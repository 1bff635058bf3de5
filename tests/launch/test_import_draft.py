"""A run that begins from somebody else's drafter: checked, taken over bit for bit, and as good as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common import config as configuration
from common.config import Config
from common.errors import CheckpointError
from launch import import_draft
from services.drafter.folder.drafter_folder import load_drafter
from services.drafter.folder.export import export
from services.drafter.model.model import DraftModel
from tests.builders.launched_runs import CONFIG, LaunchedRun

TORCHSPEC_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}


@pytest.fixture
def config() -> Config:
    return configuration.load(CONFIG, [])


@pytest.fixture
def weights(config: Config) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(weight.shape, generator=generator) for name, weight in DraftModel(config).state_dict().items()}


def make_torchspec(folder: Path) -> None:
    """An export under the names and keys of TorchSpec, with the target's embedding beside it."""
    content = json.loads((folder / "config.json").read_text())
    own = content.pop("dflash_config")
    content |= {"num_target_layers": 2, "target_num_hidden_layers": content["num_target_layers"], **own}
    del content["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {TORCHSPEC_NAMES.get(name, name): weight for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(tensors | {"embed_tokens.weight": torch.zeros(64, 32)}, folder / "model.safetensors")


@pytest.mark.parametrize("layout", ["dflash", "speculators", "torchspec"])
def test_every_layout_is_taken_over_bit_for_bit(
    tmp_path: Path, config: Config, weights: dict[str, torch.Tensor], layout: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    export(tmp_path / "theirs", config, weights, 1, None, "speculators" if layout == "speculators" else "dflash")
    if layout == "torchspec":
        make_torchspec(tmp_path / "theirs")
    arguments = [str(tmp_path / "theirs"), "--config", str(CONFIG), "--out", str(tmp_path / "ours")]
    assert import_draft.main(arguments) == 0
    said = capsys.readouterr().out
    assert f"{layout} layout, " in said
    assert said.endswith(f"begin from it: --set draft.init={tmp_path}/ours\n")
    found = load_drafter(tmp_path / "ours", config).state_dict()
    assert all(torch.equal(found[name], weight.bfloat16().float()) for name, weight in weights.items())
    assert json.loads((tmp_path / "ours/config.json").read_text())["dtype"] == "bfloat16"


def test_finer_weights_stay_as_fine(tmp_path: Path, config: Config, weights: dict[str, torch.Tensor]) -> None:
    export(tmp_path / "theirs", config, weights, 1, None)
    save_file(weights, tmp_path / "theirs/model.safetensors")
    import_draft.take_over(tmp_path / "theirs", config, tmp_path / "ours")
    found = load_drafter(tmp_path / "ours", config).state_dict()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_all_that_does_not_fit_is_named_at_once(
    tmp_path: Path, config: Config, weights: dict[str, torch.Tensor], capsys: pytest.CaptureFixture[str]
) -> None:
    export(tmp_path / "theirs", config, weights, 1, None)
    content = json.loads((tmp_path / "theirs/config.json").read_text())
    wrong = {"rope_theta": 1e6, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}, "vocab_size": 128}
    (tmp_path / "theirs/config.json").write_text(json.dumps(content | wrong))
    weights["layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    del weights["hidden_norm.weight"]
    save_file(weights, tmp_path / "theirs/model.safetensors")
    arguments = [str(tmp_path / "theirs"), "--config", str(CONFIG), "--out", str(tmp_path / "ours")]
    assert import_draft.main(arguments) == 2
    head_dim = config.draft.head_dim
    assert capsys.readouterr().err.splitlines() == [
        f"error: {tmp_path}/theirs (dflash layout) does not fit the configuration:",
        "  rope_parameters.rope_type: needed default, found yarn",
        "  vocab_size: needed 64, found 128",
        "  rope_theta: needed 10000.0, found 1000000.0",
        f"  tensor hidden_norm.weight: needed [{config.shape.hidden_size}], found None",
        f"  tensor layers.0.self_attn.q_norm.weight: needed [{head_dim}], found [16]",
    ]
    assert not (tmp_path / "ours").exists()


def test_weights_that_are_no_numbers_and_the_same_folder_are_refused(
    tmp_path: Path, config: Config, weights: dict[str, torch.Tensor]
) -> None:
    weights["fc.weight"][0, 0] = torch.nan
    export_with_nan = {name: weight.clone() for name, weight in weights.items()}
    weights["fc.weight"][0, 0] = 0.0
    export(tmp_path / "theirs", config, weights, 1, None)
    save_file(export_with_nan, tmp_path / "theirs/model.safetensors")
    with pytest.raises(CheckpointError, match=r"tensor fc\.weight: needed finite numbers, found 1 others"):
        import_draft.take_over(tmp_path / "theirs", config, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="needed another folder"):
        import_draft.take_over(tmp_path / "theirs", config, tmp_path / "theirs")


EXACT = ("draft.dtype=bfloat16", "plan.epochs=6")  # in bfloat16 an export holds the very weights of the last step


def test_a_run_begins_where_another_ended(tmp_path: Path, run: LaunchedRun) -> None:
    run.start(*EXACT)
    assert run.end() == 0, run.log_tails()
    make_torchspec(run.directory / "export")
    config = configuration.read(run.directory)
    import_draft.take_over(run.directory / "export", config, tmp_path / "ours")
    second = LaunchedRun(tmp_path / "second").start(*EXACT, f"draft.init={tmp_path}/ours", 'drafters.devices=["cpu", "cpu"]')
    try:
        assert second.end() == 0, second.log_tails()
        before, after = run.evaluations(), second.evaluations()
        assert after[0] == before[max(before)] > before[0] + 0.1
        assert "begins from" in second.log("drafter-0")
        weights = load_file(tmp_path / "ours/model.safetensors")
        save_file({name: weight + 1 for name, weight in weights.items()}, tmp_path / "ours/model.safetensors")
        assert second.start(*EXACT, f"draft.init={tmp_path}/ours").end() == 2
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
