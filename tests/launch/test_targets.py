"""Targets are decoded and compared, whatever their parts are called and whatever wraps them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Llama4Config,
    Llama4ForConditionalGeneration,
    PreTrainedModel,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from common import config as configuration
from launch import evaluate
from launch.parity.__main__ import main as parity
from tests.builders.parity_runs import SHAPE, TOML, VISION, finish_run, remove_tensor

ROPE: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
LLAMA_4_VISION: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 16}
LLAMA_4_VISION |= {"image_size": 28, "vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}


def make_run(run_dir: Path, target: PreTrainedModel) -> Path:
    """A run with this target, a checkpoint and an export."""
    target.bfloat16().save_pretrained(run_dir / "target")
    (run_dir / "run.toml").write_text(TOML.format(target=run_dir / "target"))
    return finish_run(run_dir, configuration.load(run_dir / "run.toml", []))


@pytest.mark.parametrize("kind", ["Llama 4", "Qwen3-VL"])
def test_the_target_of_a_wrapper_is_decoded_and_compared(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    target: PreTrainedModel
    if kind == "Llama 4":
        text = SHAPE | {"intermediate_size_mlp": 32, "num_local_experts": 2}
        target = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=LLAMA_4_VISION))
    else:
        target = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=SHAPE | ROPE, vision_config=VISION))
    run = make_run(tmp_path, target)
    assert evaluate.main([str(run), "--threads", "1", "--num-prompts", "2", "--dtype", "float32"]) == 0
    assert parity([str(run), "--threads", "1"]) == 0


def make_bamba() -> PreTrainedModel:
    """A target with recurrent layers (Mamba 2), whose final norm has another name and whose passes start at position 0."""
    torch.manual_seed(0)
    shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
    return BambaForCausalLM(BambaConfig(**shape, **MAMBA, attn_layer_indices=[1]))


def test_a_target_whose_final_norm_has_another_name_is_compared(tmp_path: Path) -> None:
    assert parity([str(make_run(tmp_path, make_bamba())), "--threads", "1"]) == 0


def test_a_target_whose_passes_start_at_position_0_is_decoded(tmp_path: Path) -> None:
    run = make_run(tmp_path, make_bamba())
    assert evaluate.main([str(run), "--threads", "1", "--num-prompts", "3", "--dtype", "float32"]) == 0


def test_a_target_without_one_of_its_tensors_is_not_filled_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path, make_bamba())
    remove_tensor(run / "target", "model.layers.4.feed_forward.up_proj.weight")
    assert evaluate.main([str(run), "--threads", "1"]) == 2
    assert "needed the tensors model.layers.4.feed_forward.up_proj.weight, found none of them" in capsys.readouterr().err
