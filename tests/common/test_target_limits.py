"""Targets that are refused by their JSON files, before a process starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from common import config
from common.errors import ConfigError, ModelError
from common.target_limits import refuse_quantized, refuse_special_mask

TINY = Path("launch/configs/tiny.toml")
SHAPE: dict[str, Any] = json.loads(Path("launch/configs/tiny_target/config.json").read_text())
WRAPPER = {"model_type": "llava"}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def make_target(folder: Path, generation: dict[str, Any] | None = None, **keys: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | keys))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def load(folder: Path, *overrides: str, random_init: str = "false") -> config.Config:
    return config.load(TINY, [f"model.path={folder}", f"model.random_init={random_init}", *overrides])


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"quantization_config": FP8}, "quantization_config fp8"),
        (WRAPPER | {"quantization_config": FP8, "text_config": SHAPE}, "quantization_config fp8"),
        (WRAPPER | {"text_config": SHAPE | {"quantization_config": FP8}}, "quantization_config fp8"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "quantization_config modelopt"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "quantization_config NVFP4"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config awq"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config gptq"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, "compression_config compressed-tensors"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization"),
    ],
)
def test_a_quantized_checkpoint_is_refused(tmp_path: Path, keys: dict[str, Any], found: str) -> None:
    folder = make_target(tmp_path / "target", **keys)
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert str(caught.value) == f"model.path: needed weights that are not quantized, found {found} in {folder}"
    load(folder, random_init="true")  # reads no weights


def test_a_quantization_of_modelopt_beside_the_configuration_is_refused(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target", quantization_config=None)
    refuse_quantized(folder)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ModelError, match=r"needed weights that are not quantized, found hf_quant_config\.json in"):
        load(folder)


@pytest.mark.parametrize(
    ("keys", "generation", "found"),
    [
        ({"bos_token_id": 63}, None, "bos_token_id of {folder}/config.json"),
        ({"pad_token_id": 63}, None, "pad_token_id of {folder}/config.json"),
        (WRAPPER | {"text_config": SHAPE | {"eos_token_id": [1, 63]}}, None, "eos_token_id of {folder}/config.json"),
        ({}, {"eos_token_id": [2, 63]}, "eos_token_id of {folder}/generation_config.json"),
        ({}, {"pad_token_id": 63}, "pad_token_id of {folder}/generation_config.json"),
    ],
)
def test_a_mask_token_that_text_contains_is_refused(
    tmp_path: Path, keys: dict[str, Any], generation: dict[str, Any] | None, found: str
) -> None:
    folder = make_target(tmp_path / "target", generation, **keys)
    with pytest.raises(ConfigError) as caught:
        load(folder, random_init="true")
    message = "draft.mask_token_id: needed an id that text never contains, found 63, the "
    assert str(caught.value) == message + found.format(folder=folder)
    refuse_special_mask(folder, 62)
