"""A whole run on an FP8 checkpoint of a multimodal model: trained, exported, compared and decoded."""

from pathlib import Path

import pytest

from launch import evaluate
from launch.parity.__main__ import main as parity
from tests.builders.launched_runs import LaunchedRun
from tests.builders.quantized_folders import LAYOUTS, quantize_folder
from tests.builders.whole_models import make_folder


def test_a_quantized_target_is_trained_for(run: LaunchedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_folder("hybrid in a multimodal wrapper", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "target", LAYOUTS["fp8 blocks"], num_shards=2)
    run.start(f"model.path={tmp_path / 'target'}", "model.random_init=false", "plan.epochs=4")
    assert run.end() == 0, run.log_tails()
    assert "quantized weights are dequantized while they are read, nothing ignored" in run.log("target-0")
    assert parity([str(run.directory), "--threads", "1"]) == 0, capsys.readouterr().out
    assert evaluate.main([str(run.directory), "--threads", "1", "--num-prompts", "2", "--dtype", "float32"]) == 0


def test_a_damaged_checkpoint_ends_before_a_process_starts(run: LaunchedRun, tmp_path: Path) -> None:
    make_folder("qwen3", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "target", LAYOUTS["modelopt"], num_shards=2)
    (tmp_path / "target" / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}}')
    run.start(f"model.path={tmp_path / 'target'}", "model.random_init=false")
    assert run.end() == 2
    assert "down_proj.weight_scale [32, 1] for model.layers.0.mlp.down_proj.weight [32, 48], found []" in run.stderr
    assert not run.directory.exists()
