"""Which JSON files name which rule, and every quantization without one is refused in one line, before a process starts."""

import json
from pathlib import Path
from typing import Any

import pytest

from common import config
from common.errors import ModelError
from common.quantization import ALL, read_rule

TINY = Path("launch/configs/tiny.toml")
SHAPE: dict[str, Any] = json.loads(Path("launch/configs/tiny_target/config.json").read_text())
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "channel"}
WRAPPER = {"model_type": "llava"}


def make_target(folder: Path, **keys: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPE | keys))
    return folder


def compressed(*weights: dict[str, Any] | None, format: str = "pack-quantized", **keys: Any) -> dict[str, Any]:
    groups = {f"group_{index}": {"targets": ["Linear"], "weights": each} for index, each in enumerate(weights)}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups, **keys}


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}, "quantization_config modelopt NVFP4"),
        ({"quantization_config": {"quant_algo": "NVFP4"}}, "quantization_config modelopt NVFP4"),
        (
            {"quantization_config": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}}},
            "quantization_config modelopt W4A8_AWQ",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 8}}, "quantization_config awq gemm of 8 bits"),
        (
            {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemv"}},
            "quantization_config awq gemv of 4 bits",
        ),
        (
            WRAPPER | {"text_config": SHAPE | {"quantization_config": GPTQ | {"bits": 3}}},
            "quantization_config gptq gemm of 3 bits",
        ),
        ({"quantization_config": GPTQ | {"checkpoint_format": "marlin"}}, "quantization_config gptq marlin of 4 bits"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config bitsandbytes"),
        ({"quantization_config": {"load_in_4bit": True}}, "quantization_config of no quant_method"),
        ({"quantization_config": "fp8"}, "quantization_config 'fp8'"),
        ({"quantization": {"bits": 4, "group_size": 64}}, "quantization of no quant_method"),
        (
            {"quantization_config": FP8 | {"weight_block_size": [128]}},
            "quantization_config Expected `array` of length 2, got 1",
        ),
        ({"quantization_config": FP8 | {"weight_block_size": [0, 128]}}, "quantization_config blocks of 0 x 128"),
        (
            WRAPPER | {"quantization_config": FP8, "text_config": SHAPE | {"quantization_config": {"quant_method": "mxfp4"}}},
            "quantization_config two that differ, quantization_config and quantization_config",
        ),
        (
            {"quantization_config": compressed(INT4 | {"symmetric": False})},
            "quantization_config compressed-tensors with zero points",
        ),
        (
            {"quantization_config": compressed(INT4 | {"actorder": "group"})},
            "quantization_config compressed-tensors with columns ordered by activation",
        ),
        (
            {"quantization_config": compressed(INT4, INT4 | {"num_bits": 8})},
            "quantization_config compressed-tensors pack-quantized of 4-bit int, 8-bit int",
        ),
        (
            {"quantization_config": compressed(INT4 | {"type": "float"}, format="nvfp4-pack-quantized")},
            "quantization_config compressed-tensors nvfp4-pack-quantized of 4-bit float",
        ),
        (
            {"quantization_config": compressed(FLOAT8 | {"strategy": "token"}, format="float-quantized")},
            "quantization_config compressed-tensors with scales per token",
        ),
        (
            {
                "compression_config": compressed(
                    FLOAT8, format="float-quantized", sparsity_config={"format": "sparse-24-bitmask"}
                )
            },
            "compression_config compressed-tensors with a sparsity_config",
        ),
        (
            {
                "quantization_config": compressed(
                    FLOAT8, format="float-quantized", transform_config={"config_groups": {"R1": 1}}
                )
            },
            "quantization_config compressed-tensors with a transform_config",
        ),
        (
            {"quantization_config": compressed({"type": "float"}, format="float-quantized")},
            "quantization_config Object missing required field `num_bits`",
        ),
        ({"quantization_config": compressed(None)}, "quantization_config compressed-tensors of the formats []"),
    ],
)
def test_a_quantization_without_a_rule_is_refused(tmp_path: Path, keys: dict[str, Any], found: str) -> None:
    folder = make_target(tmp_path / "target", **keys)
    with pytest.raises(ModelError) as caught:
        config.load(TINY, [f"model.path={folder}", "model.random_init=false"])
    needed = "plain weights or one of fp8, compressed-tensors, modelopt, mxfp4, awq and gptq in a form known here"
    assert str(caught.value) == f"model.path: needed {needed}, found {found} in {folder}"
    if not isinstance(keys.get("quantization_config"), str):  # which transformers cannot read either
        config.load(TINY, [f"model.path={folder}", "model.random_init=true"])  # reads no weights


@pytest.mark.parametrize(
    ("keys", "blocks"),
    [
        ({"quantization_config": FP8}, {(128, 128)}),
        ({"quantization_config": FP8, "text_config": SHAPE | {"quantization_config": FP8}}, {(128, 128)}),
        ({"text_config": SHAPE | {"quantization_config": {"quant_method": "fp8"}}}, {(ALL, ALL)}),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}}, {(128, 128)}),
        ({"quantization_config": {"producer": {}, "quantization": {"quant_algo": "FP8"}}}, {(ALL, ALL)}),
        ({"quantization_config": {"quant_method": "mxfp4"}}, {(1, 32)}),
        ({"quantization_config": {"quant_method": "awq", "w_bit": 4, "q_group_size": 64, "version": "GEMM"}}, {(64, 1)}),
        ({"quantization_config": GPTQ | {"group_size": -1}}, {(ALL, 1)}),
        ({"quantization_config": compressed(INT4)}, {(1, 32)}),
        (
            {"compression_config": compressed(FLOAT8, {"num_bits": 8, "type": "int"}, None, format="naive-quantized")},
            {(1, ALL), (ALL, ALL)},
        ),
    ],
)
def test_a_rule_says_what_shares_a_scale(tmp_path: Path, keys: dict[str, Any], blocks: set[tuple[int, int]]) -> None:
    rule = read_rule(make_target(tmp_path / "target", **keys))
    assert rule is not None and rule.blocks == blocks


def test_a_quantization_of_modelopt_stands_beside_the_configuration(tmp_path: Path) -> None:
    folder = make_target(tmp_path / "target", quantization_config=None)
    assert read_rule(folder) is None
    path = folder / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    rule = read_rule(folder)
    assert rule is not None and rule.blocks == {(ALL, ALL)}
    path.write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(ModelError, match=r"found hf_quant_config\.json modelopt NVFP4 in"):
        read_rule(folder)
