"""launch.parity says "the same" of every kind of drafter that nobody touched, whichever the reference."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from common import config as configuration
from launch.decoding.full_target import load_full_target
from launch.parity.__main__ import main
from launch.parity.compare import compare_traces
from launch.parity.folder import read_folder
from launch.parity.plain import PlainTarget, run_plain
from launch.parity.probe import read_documents
from services.drafter.folder.checkpoint import draft_identity, load_weights
from services.drafter.folder.export import export
from tests.builders.glimmer import run_glimmer
from tests.builders.parity_runs import edit_config, edit_tensor, finish_run, make_run, remove_tensor

ROOT = Path(__file__).parents[3]
FULL = ["draft.layer_types=[]", "draft.sliding_window=0"]
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 1024}
KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "mixed layers": ([], {}),
    "full layers": (FULL, {}),
    "sliding layers": (["draft.layer_types=['sliding_attention','sliding_attention','sliding_attention']"], {}),
    "a window shorter than the block": (["draft.sliding_window=2"], {}),
    "a tied head": ([], {"model_type": "llama", "tie_word_embeddings": True}),
    "nested config, hybrid target, partial rotation of the target": ([], {"model_type": "nested"}),
    "heads of another size": (["draft.head_dim=16"], {}),
    "as many keys as queries": (["draft.num_key_value_heads=4"], {}),
    "one key head": (["draft.num_key_value_heads=1"], {}),
    "the last layer tapped": (["draft.tap_layers=[1, 4]"], {}),
    "a target with YaRN": ([], {"rope_parameters": YARN}),
    "a padded vocabulary": ([], {"vocab_size": 96}),
    "trained in bfloat16": (["draft.dtype='bfloat16'", "model.dtype='bfloat16'"], {}),
}


def compare(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of the command, run in this process."""
    code = main([*map(str, arguments), "--json", "--threads", "1"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", KINDS)
def test_an_untouched_export_is_the_same(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    overrides, shape = KINDS[kind]
    run = make_run(tmp_path / "run", *overrides, **shape)
    for arguments in (["--reference", str(run)], ["--reference", "training"]):
        code, report = compare(capsys, run, *arguments)
        differing = [stage for stage in report["stages"] if not stage["same"]]
        assert (code, differing, report["warnings"]) == (0, [], []), arguments
        assert report["num_blocks"] == 12
        closest = max(stage["difference"] / stage["bound"] for stage in report["stages"] if stage["bound"])
        assert 0 < closest < 0.2  # far from an alarm, and both sides did compute
    assert len(compare(capsys, run)[1]["stages"]) == 11


@pytest.mark.parametrize("kind", KINDS)
def test_what_it_takes_for_an_engine_computes_what_the_model_of_transformers_does(kind: str, tmp_path: Path) -> None:
    overrides, shape = KINDS[kind]
    run = make_run(tmp_path / "run", *overrides, **shape)
    config = configuration.read(run)
    in_float32 = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="float32"))
    target, folder = PlainTarget(load_full_target(in_float32, torch.device("cpu"))), read_folder(run / "export")
    documents = read_documents(run / "data/eval", num_documents=4, max_tokens=192)
    verdicts = compare_traces(run_glimmer(folder, target, documents), run_plain(folder, target, documents))
    assert len(verdicts) == 5
    assert [verdict for verdict in verdicts if not verdict.same] == []
    assert max(verdict.difference for verdict in verdicts) > 0.0  # two computations, not one


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["mixed layers", "a tied head"])
def test_an_untouched_export_is_the_same_with_the_target_on_a_gpu(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides, shape = KINDS[kind]
    run = make_run(tmp_path / "run", *overrides, **shape)
    code, report = compare(capsys, run, "--device", "cuda")
    assert (code, [stage for stage in report["stages"] if not stage["same"]]) == (0, [])


def test_a_run_with_a_made_up_target_and_no_export_yet(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = configuration.load(ROOT / "launch/configs/tiny.toml", [f'model.path="{ROOT}/launch/configs/tiny_target"'])
    finish_run(run, config)
    shutil.rmtree(run / "export")
    code, report = compare(capsys, run)
    assert (code, report["same"], report["first_difference"]) == (0, True, None)
    assert report["found"].endswith("export of step-00000003 as an engine runs it")
    assert report["needed"] == f"{run}, checkpoint of step 3, in training form"


def test_a_folder_beside_another_on_made_up_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    shutil.copytree(run / "export", tmp_path / "copy")
    arguments = (tmp_path / "copy", "--model", run / "target")
    assert compare(capsys, *arguments)[0] == 0
    assert compare(capsys, *arguments, "--reference", run / "export")[0] == 0
    code, report = compare(capsys, *arguments, "--data", run / "data/eval", "--num-documents", "2", "--reference", run)
    assert (code, report["num_blocks"]) == (0, 6)
    edit_tensor(tmp_path / "copy", "norm.weight", lambda weight: weight * 1.5)
    code, report = compare(capsys, *arguments, "--reference", run / "export")
    assert (code, report["first_difference"]) == (1, "hidden states")
    assert report["cause"].endswith(": norm.weight")


def test_several_evaluation_sets_share_the_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    sets = {name: str(run / "data" / name) for name in ("train", "eval")}
    edit_config(run, data={"eval_path": "", "eval_paths": sets})
    code, report = compare(capsys, run, "--num-documents", "3")
    assert (code, report["num_blocks"]) == (0, 12)


def test_the_layouts_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    written = json.loads((run / "export/config.json").read_text())
    own = written.pop("dflash_config")
    flat = {**written, "mask_token_id": own["mask_token_id"], "target_layer_ids": own["target_layer_ids"]}
    renamed = {
        "fc.weight": "context_proj.weight",
        "hidden_norm.weight": "context_norm.weight",
        "norm.weight": "final_norm.weight",
    }
    tensors = load_file(run / "export/model.safetensors")
    torchspec = {renamed.get(name, name): tensor for name, tensor in tensors.items()}
    (tmp_path / "torchspec").mkdir()
    (tmp_path / "torchspec/config.json").write_text(json.dumps(flat))
    save_file(torchspec, tmp_path / "torchspec/model.safetensors")
    code, report = compare(capsys, tmp_path / "torchspec", "--reference", run)
    assert (code, report["warnings"]) == (0, [])


@pytest.mark.parametrize(("kind", "right"), [("full_attention", True), ("sliding_attention", False)])
def test_the_speculators_layout_beside_the_run_and_beside_the_target_alone(
    kind: str, right: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM makes of sliding_window_non_causal one value for every layer, and takes true where it is not written."""
    run, exported = make_run(tmp_path / "run", f"draft.layer_types={[kind] * 3}"), tmp_path / "exported"
    config = configuration.read(run)
    _, weights = load_weights(run / "checkpoints/step-00000003", draft_identity(config))
    export(exported, config, weights, 3, None, "speculators")
    for flag in (True, False, None):
        edit_config(exported, sliding_window_non_causal=flag)
        is_right = right if flag is None else flag == right
        for reference in (("--reference", run), ("--model", run / "target")):
            code, report = compare(capsys, exported, *reference)
            assert (code, report["first_difference"]) == ((0, None) if is_right else (1, "masks")), (flag, reference)
    assert report["warnings"] == []


@pytest.mark.parametrize("flag", [True, False, None])
def test_no_speculators_folder_of_mixed_layers_is_the_same(
    flag: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, theirs = make_run(tmp_path / "run"), tmp_path / "theirs"
    shutil.copytree(run / "export", theirs)
    written = json.loads((theirs / "config.json").read_text())
    own = written.pop("dflash_config")
    speculators = {
        "speculators_model_type": "dflash",
        "transformer_layer_config": written,
        "block_size": written["block_size"],
        "mask_token_id": own["mask_token_id"],
        "aux_hidden_state_layer_ids": [layer + 1 for layer in own["target_layer_ids"]],
    }
    (theirs / "config.json").write_text(json.dumps(speculators))
    edit_config(theirs, sliding_window_non_causal=flag)
    code, report = compare(capsys, theirs, "--reference", run)
    assert (code, report["first_difference"]) == (1, "masks")
    layer = 0 if flag in (True, None) else 1
    assert report["stages"][6]["worst"]["where"].startswith(f"layer {layer}, document 0")


def test_the_table_as_typed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    command = [sys.executable, "-m", "launch.parity", str(run), "--threads", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\ntaps " in done.stdout
    assert "DIFFERS" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("the same: no number is further apart than 6e-05")
    edit_config(run / "export", rope_theta=10000.0, rope_parameters={"rope_theta": 10000.0})
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=200)
    assert (done.returncode, done.stderr) == (1, "")
    assert "\nfirst difference: rotary angles\n  cosine, document 0, row " in done.stdout
    assert "\nlikely cause: rope_theta: the angles differ channel by channel as theta 10000 does from 1e+06" in done.stdout


def break_drafters(drafter: Path, target: Path, folder: Path) -> None:
    """Write one broken copy of the drafter, or of the target, for each kind of fault."""
    changes: dict[str, dict[str, Any]] = {
        "far": {"dflash_config": {"target_layer_ids": [0, 9]}},
        "unknown": {"dflash_config": {"mask_token_id": 64}},
        "fewer": {"dflash_config": {"target_layer_ids": [0]}},
        "rope": {"rope_parameters": {"rope_type": "spiral"}},
        "act": {"hidden_act": "leap"},
    }
    for name, keys in changes.items():
        shutil.copytree(drafter, folder / name)
        edit_config(folder / name, **keys)
    for name, content in (("list", "[]"), ("text", "nothing"), ("odd", '{"dflash_config": 3}')):
        shutil.copytree(drafter, folder / name)
        (folder / name / "config.json").write_text(content)
    shutil.copytree(drafter, folder / "less")
    remove_tensor(folder / "less", "layers.1.self_attn.k_norm.weight")
    shutil.copytree(target, folder / "headless")
    remove_tensor(folder / "headless", "lm_head.weight")


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    drafter, target = run / "export", run / "target"
    break_drafters(drafter, target, tmp_path)
    cases: list[tuple[list[Any], str]] = [
        ([tmp_path / "rope", "--model", target], "found a value that is none: rope_type spiral"),
        ([tmp_path / "act", "--model", target], "found a value that is none: hidden_act leap"),
        ([tmp_path / "list", "--model", target], "list/config.json: needed an object, found list"),
        ([tmp_path / "text", "--model", target], "text/config.json: not JSON"),
        ([tmp_path / "odd", "--model", target], "odd/config.json: needed the key 'block_size', found none"),
        ([tmp_path / "nowhere", "--model", target], "nowhere/config.json: cannot be read: No such file or directory"),
        ([drafter], "--model: needed the folder of the target, found none"),
        ([drafter, "--model", tmp_path / "nowhere"], "needed a model folder with config.json, found none in"),
        ([target, "--model", target], "run/target: needed a drafter with the tensor fc.weight, found none of this name"),
        ([run, "--step", "9"], "step-00000009"),
        ([run, "--data", tmp_path], "data set"),
        ([run, "--reference", tmp_path / "nowhere"], "nowhere/config.json: cannot be read"),
        ([tmp_path / "far", "--model", target], "far does not fit this target: target_layer_ids: needed layers from 0 to 4,"),
        ([tmp_path / "unknown", "--model", target], "mask_token_id: needed an id below 64, found 64"),
        ([tmp_path / "less", "--model", target], "tensor layers.1.self_attn.k_norm.weight: needed [8], found None"),
        ([run, "--model", tmp_path / "headless"], "headless: needed a tensor named lm_head.weight, found none"),
        ([tmp_path / "fewer", "--model", target], "tensor fc.weight: needed [32, 32], found [32, 64]"),
    ]
    capsys.readouterr()  # what saving the target printed
    for arguments, message in cases:
        assert main([*map(str, arguments), "--threads", "1"]) == 2
        captured = capsys.readouterr()
        assert (captured.out, captured.err.count("\n")) == ("", 1)
        assert captured.err.startswith("error: ")
        assert message in captured.err
