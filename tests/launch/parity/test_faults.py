"""launch.parity names the first stage of every fault that was planted on one side, and the likely cause."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.data.dataset import Dataset
from launch.parity.__main__ import main
from tests.builders.parity_runs import edit_config, edit_tensor, make_run

Plant = Callable[[Path], None]  # changes a drafter's folder
FULL = "full_attention"


def config(**changes: Any) -> Plant:
    return lambda folder: edit_config(folder, **changes)


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Plant:
    return lambda folder: edit_tensor(folder, name, change)


# Fault: what plants it, the stage, the reading, what the cause must say; then whether the target alone shows it too.
FAULTS: dict[str, tuple[Plant, str, str, str, bool]] = {
    "theta 10000": (
        config(rope_theta=10000.0, rope_parameters={"rope_theta": 10000.0}),
        "rotary angles",
        "cosine, document 0",
        "rope_theta: the angles differ channel by channel as theta 10000 does from 1e+06",
        True,
    ),
    "theta not written": (
        config(rope_theta=None, rope_parameters=None),
        "rotary angles",
        "cosine, document 0",
        "as theta 10000 does from 1e+06",
        True,
    ),
    "theta 10000 by the older schema": (
        config(rope_theta=10000.0),
        "rotary angles",
        "cosine, far positions by the older keys",
        "the older keys rope_theta and rope_scaling of config.json contradict rope_parameters",
        True,
    ),
    "partial rotary": (
        config(rope_parameters={"partial_rotary_factor": 0.5}),
        "rotary angles",
        "cosine, document 0",
        "partial_rotary_factor: 4 of 8 channels of a head are not rotated",
        True,
    ),
    "partial rotary by the older schema": (
        config(rope_parameters=None, partial_rotary_factor=0.25),
        "rotary angles",
        "cosine, document 0",
        "partial_rotary_factor: 6 of 8 channels",
        True,
    ),
    "another scaling": (
        config(rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}),
        "rotary angles",
        "cosine, document 0",
        "rope_scaling: another kind of scaling",
        True,
    ),
    "taps one too high": (
        config(dflash_config={"target_layer_ids": [1, 3]}),
        "taps",
        "tap 0, document 0",
        "layers [1, 3] are tapped, needed [0, 2], off by +1",
        False,
    ),
    "one tap elsewhere": (
        config(dflash_config={"target_layer_ids": [0, 3]}),
        "taps",
        "tap 1, document 0",
        "layers [0, 3] are tapped, needed [0, 2]",
        False,
    ),
    "window ignored": (
        config(use_sliding_window=False),
        "masks",
        "layer 0, document 0",
        "the first row of a block sees",
        True,
    ),
    "window and layer types ignored": (
        config(layer_types=[FULL, FULL, FULL]),
        "masks",
        "layer 0, document 0",
        "looks both ways inside a block, the drafter learnt to look causally",
        False,
    ),
    "window one too wide": (
        config(sliding_window=7),
        "masks",
        "layer 0, document 0",
        "the first row of a block sees 7 rows, the drafter learnt with 6",
        False,
    ),
    "causality of sliding layers swapped": (
        config(is_causal=False),
        "masks",
        "layer 0, document 0",
        "looks both ways inside a block, the drafter learnt to look causally",
        True,
    ),
    "causality of full layers swapped": (
        config(dflash_config={"causal": True}),
        "masks",
        "layer 1, document 0",
        "looks causally inside a block, the drafter learnt to look both ways",
        True,
    ),
    "another eps": (
        config(rms_norm_eps=0.1),
        "projection",
        "document 0",
        "the weights of this stage agree, so the arithmetic differs: rms_norm_eps",
        True,
    ),
    "another activation": (
        config(hidden_act="gelu"),
        "hidden states",
        "layer 0, document 0",
        "the weights of this stage agree, so the arithmetic differs: rms_norm_eps, hidden_act",
        True,
    ),
    "a layer left out": (
        config(num_hidden_layers=2, layer_types=["sliding_attention", FULL]),
        "keys and values",
        "",
        "another shape (keys of layer 2, document 0",
        False,
    ),
    "wrong mask token": (
        config(dflash_config={"mask_token_id": 62}),
        "tokens",
        "document 0, block at row",
        "mask_token_id: masked slots are filled with 62, the drafter learnt them as 63",
        False,
    ),
    "another block size": (
        config(block_size=3),
        "tokens",
        "",
        "another shape (document 0, block at row",
        False,
    ),
    "k_norm dropped in one layer": (
        tensor("layers.1.self_attn.k_norm.weight", torch.ones_like),
        "keys and values",
        "keys of layer 1, document 0",
        "layers.1.self_attn.k_norm.weight: 1 everywhere in what was found",
        False,
    ),
    "q_norm dropped in one layer": (
        tensor("layers.2.self_attn.q_norm.weight", torch.ones_like),
        "hidden states",
        "layer 2, document 0",
        "layers.2.self_attn.q_norm.weight: 1 everywhere in what was found",
        False,
    ),
    "hidden_norm of another step": (
        tensor("hidden_norm.weight", lambda weight: weight * 1.01),
        "projection",
        "document 0",
        "the weights differ, as those of another step or a damaged file would: hidden_norm.weight",
        False,
    ),
}


@pytest.fixture(scope="module")
def untouched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("parity") / "run")


@pytest.fixture
def drafter(untouched: Path, tmp_path: Path) -> Path:
    """A copy of the run's export."""
    shutil.copytree(untouched / "export", tmp_path / "drafter")
    return tmp_path / "drafter"


def compare(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command."""
    code = main([*map(str, arguments), "--json", "--threads", "1"])
    return code, json.loads(capsys.readouterr().out)


def worst(report: dict[str, Any]) -> dict[str, Any]:
    """Return the worst number of the first stage that differs."""
    found: dict[str, Any] = next(stage for stage in report["stages"] if not stage["same"])["worst"] or {"where": ""}
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_beside_the_run_every_fault_is_named(
    fault: str, untouched: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, stage, where, cause, _ = FAULTS[fault]
    plant(drafter)
    code, report = compare(capsys, drafter, "--reference", untouched)
    assert (code, report["same"], report["first_difference"]) == (1, False, stage)
    assert worst(report)["where"].startswith(where)
    assert cause in report["cause"]
    if where:
        assert abs(worst(report)["needed"] - worst(report)["found"]) > worst(report)["bound"]


@pytest.mark.parametrize("fault", FAULTS)
def test_beside_the_target_alone_what_contradicts_it_is_named(
    fault: str, untouched: Path, drafter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, stage, _, cause, shows = FAULTS[fault]
    plant(drafter)
    code, report = compare(capsys, drafter, "--model", untouched / "target")
    assert (code, report["first_difference"]) == ((1, stage) if shows else (0, None))
    assert not shows or cause in report["cause"]


def test_a_window_that_no_document_reaches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "draft.sliding_window=5000")
    edit_config(run / "export", sliding_window=4999)
    code, report = compare(capsys, run)
    assert (code, report["first_difference"]) == (1, "masks")
    assert worst(report)["where"] == "layer 0, block at row 40000 of a long document"
    assert report["cause"].endswith("the first row of a block sees 4999 rows, the drafter learnt with 5000")


def test_a_number_that_is_none(untouched: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_tensor(drafter, "layers.0.mlp.up_proj.weight", lambda weight: weight * float("nan"))
    code, report = compare(capsys, drafter, "--reference", untouched)
    assert (code, report["first_difference"], worst(report)["found"]) == (1, "hidden states", None)
    assert report["cause"].endswith(": layers.0.mlp.up_proj.weight")


def test_a_random_head(untouched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(untouched / "target", tmp_path / "target")
    edit_tensor(tmp_path / "target", "lm_head.weight", lambda weight: torch.randn_like(weight) * weight.std())
    code, report = compare(capsys, untouched, "--model", tmp_path / "target", "--num-documents", "3")
    assert report["num_blocks"] == 9  # the run's samples
    assert (code, report["first_difference"]) == (1, "logits")
    assert "the hidden states agree, so the head differs: it is unlike the needed one: random" in report["cause"]


def test_a_head_that_came_with_the_folder(untouched: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = load_file(drafter / "model.safetensors")
    save_file(tensors | {"lm_head.weight": torch.randn(64, 32)}, drafter / "model.safetensors", metadata={"format": "pt"})
    code, report = compare(capsys, drafter, "--model", untouched / "target")
    assert (code, report["first_difference"]) == (1, "logits")
    assert report["warnings"] == ["lm_head.weight is in the folder: an engine that loads it does not use the target's"]


def test_a_trainer_that_took_the_wrong_theta(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", rope_theta=10000.0)
    edit_config(run / "target", rope_theta=None, rope_parameters={"rope_theta": 1e6})
    code, report = compare(capsys, run / "export", "--model", run / "target")
    assert (code, report["first_difference"]) == (1, "rotary angles")
    assert "as theta 10000 does from 1e+06" in report["cause"]


def test_two_folders(untouched: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edit_config(drafter, dflash_config={"mask_token_id": 5})
    arguments = (untouched / "export", "--model", untouched / "target", "--reference", drafter)
    code, report = compare(capsys, *arguments)
    assert (code, report["first_difference"]) == (1, "tokens")
    assert (worst(report)["needed"], worst(report)["found"], worst(report)["channel"]) == (5, 63, 1)


def test_warnings_about_settings_that_the_target_alone_cannot_decide(
    untouched: Path, drafter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(untouched / "target", tmp_path / "target")
    edit_config(tmp_path / "target", eos_token_id=[9, 62], pad_token_id=61)
    model = ("--model", tmp_path / "target")
    for changes, warning in (
        ({"dflash_config": {"mask_token_id": 62}}, "mask_token_id 62 is a beginning, end or padding token of the target"),
        ({"dflash_config": {"mask_token_id": 61}}, "mask_token_id 61 is a beginning, end or padding token of the target"),
        ({"dflash_config": {"mask_token_id": 63, "target_layer_ids": [2, 3]}}, "[1, 2], off by +1"),
        ({"num_target_layers": 6}, "num_target_layers: needed 5, as the target has, found 6"),
        ({"rope_theta": None, "rope_parameters": None}, "names no rope_theta: engines take 10000, the target has 1e+06"),
    ):
        edit_config(drafter, **changes)
        assert any(warning in found for found in compare(capsys, drafter, *model)[1]["warnings"]), warning
    edit_tensor(drafter, "layers.1.self_attn.k_norm.weight", torch.ones_like)
    warnings = compare(capsys, drafter, *model)[1]["warnings"]
    assert "layers.1.self_attn.k_norm.weight is 1 everywhere, unlike that of other layers" in warnings
    token = int(Dataset.open(untouched / "data/eval").read(0).input_ids[0])
    edit_config(drafter, dflash_config={"mask_token_id": token})
    _, report = compare(capsys, drafter, *model, "--data", untouched / "data/eval")
    assert any(f"mask_token_id {token} stands in the text" in found for found in report["warnings"])
