"""Quantized checkpoints of every published layout give the numbers of the rule, bit for bit; damaged ones are errors."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import ones
from transformers import GptOssConfig, GptOssForCausalLM

from common.dequantize import open_dequantized
from common.errors import ModelError
from common.quantized_weights import check_quantization
from launch.data.generator import load_model
from launch.decoding.full_target import load_full_target
from services.drafter.model.frozen import load_embedding_and_head
from services.target.model import TargetModel
from tests.builders.published_rules import dequantize, multiply, read_float8
from tests.builders.quantized_folders import BLOCK, LAYOUTS, in_blocks, quantize_folder, write_shards
from tests.builders.whole_models import CPU, SHAPE, VOCABULARY, make_config, make_folder


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every weight in several parts, as large ones are."""
    monkeypatch.setattr("common.dequantize._CHUNK_ELEMENTS", 64)


def make_plain(kind: str, folder: Path) -> None:
    if kind == "gpt-oss":
        torch.manual_seed(3)
        shape = SHAPE | {"intermediate_size": 64, "num_local_experts": 3, "num_experts_per_tok": 2}
        GptOssForCausalLM(GptOssConfig(**shape)).save_pretrained(folder)
    else:
        make_folder(kind, folder)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


FLAT = [("llama", layout) for layout in LAYOUTS if layout != "mxfp4"]
WRAPPED = [("hybrid in a multimodal wrapper", layout) for layout in ("fp8 blocks", "compressed per channel", "modelopt")]
EXPERTS = [("hybrid with experts", "fp8 blocks"), ("hybrid with experts", "compressed int4"), ("gpt-oss", "mxfp4")]


@pytest.mark.parametrize(("kind", "layout"), FLAT + WRAPPED + EXPERTS)
def test_every_layout_gives_the_numbers_of_its_rule(kind: str, layout: str, tmp_path: Path) -> None:
    make_plain(kind, tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS[layout], num_shards=3 if kind == "llama" else 1)
    write_shards(tmp_path / "plain", dequantize(read_all(tmp_path / "quantized"), layout), 1)
    plain, quantized = (make_config(tmp_path / name, [1, 3]) for name in ("plain", "quantized"))
    expected, found = (dict(load_full_target(config, CPU).named_parameters()) for config in (plain, quantized))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    if kind == "gpt-oss":
        return  # attention with sinks does not run through SDPA
    models = [TargetModel.load(config, CPU) for config in (plain, quantized)]
    expected, found = (dict(model.decoder.named_parameters()) for model in models)
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    input_ids = torch.randint(0, VOCABULARY, (2, 9))
    assert all(torch.equal(*taps) for taps in zip(*(model.forward(input_ids) for model in models), strict=True))


@pytest.mark.parametrize(
    ("layout", "removed", "added", "found"),
    [
        ("fp8 blocks", "weight_scale_inv", {}, r"needed {weight}_scale_inv, the scales of {weight} \(F8_E4M3\), found none"),
        (
            "fp8 blocks",
            "",
            {"weight_scale_inv": ones(2, 2)},
            r"needed {weight}_scale_inv \[3, 3\] .*, found \[2, 2\]",
        ),
        ("fp8 per tensor", "", {"weight_scale_inv": ones(48, 1)}, r"needed {weight}_scale_inv \[1, 1\] for .* \[48, 1\]"),
        (
            "compressed per channel",
            "",
            {"weight_scale": ones(32)},
            r"needed {weight}_scale \[48, 1\] .*, found \[32\]",
        ),
        (
            "compressed per channel",
            "",
            {"weight_scale": ones(1, 48)},
            r"needed {weight}_scale .*, found \[1, 48\]",
        ),
        (
            "compressed int8",
            "",
            {"weight_zero_point": ones(48, 1)},
            "scales only, found {weight}_zero_point beside",
        ),
        ("compressed int4", "weight_scale", {}, r"needed {weight}_scale, the scales of {weight}_packed \(I32\), found none"),
        (
            "compressed int4",
            "",
            {"weight_g_idx": ones(32).int()},
            "scales only, found {weight}_g_idx beside",
        ),
        ("gptq", "scales", {}, r"needed {module}scales, the scales of {module}qweight \(I32\), found none"),
        ("gptq", "qzeros", {}, r"needed {module}qzeros I32 \[2, 6\], found none"),
        ("gptq ordered", "g_idx", {}, r"needed {module}g_idx I32 \[32\], found none"),
        ("awq", "", {"qzeros": ones(2, 5).int()}, r"needed {module}qzeros I32 \[2, 6\], found I32 \[2, 5\]"),
        ("awq", "qweight", {"weight": ones(48, 32)}, "scales only, found {module}scales beside them"),
        ("modelopt", "", {"pre_quant_scale": ones(32)}, r"scales only, found {module}pre_quant_scale beside them"),
        ("modelopt", "", {"weight_scale": ones(1).int()}, r"needed {weight}_scale of type .*, found I32"),
        ("modelopt", "", {"weight": ones(48, 32)}, r"scales only, found {weight}_scale beside them"),
        ("modelopt", "weight_scale", {"weight": ones(48, 32).char()}, r"16 bits or more, or scales, found {weight} I8"),
    ],
)
def test_a_damaged_checkpoint_is_refused_before_it_is_loaded(
    layout: str, removed: str, added: dict[str, torch.Tensor], found: str, tmp_path: Path
) -> None:
    """In a layer that is not loaded, so the headers alone tell."""
    make_plain("llama", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS[layout])
    config = make_config(tmp_path / "quantized", [1])
    tensors, module = read_all(tmp_path / "quantized"), "model.layers.4.mlp.up_proj."
    tensors.pop(f"{module}{removed}", None)
    write_shards(tmp_path / "quantized", tensors | {f"{module}{name}": tensor for name, tensor in added.items()}, 1)
    error = found.format(weight=f"{module}weight", module=module)
    for check in (lambda: check_quantization(tmp_path / "quantized"), lambda: TargetModel.load(config, CPU)):
        with pytest.raises(ModelError, match=error):
            check()


def test_a_tensor_that_no_rule_and_no_layer_knows_is_an_error(tmp_path: Path) -> None:
    make_plain("llama", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS["fp8 blocks"])
    tensors = read_all(tmp_path / "quantized")
    write_shards(tmp_path / "quantized", tensors | {"model.layers.0.self_attn.sinks": torch.ones(4)}, 1)
    with pytest.raises(ModelError, match=r"needed tensors that the decoder knows, found layers\.0\.self_attn\.sinks"):
        TargetModel.load(make_config(tmp_path / "quantized", [1]), CPU)


def test_a_row_of_a_group_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    make_plain("llama", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS["gptq ordered"])
    tensors = read_all(tmp_path / "quantized")
    tensors["model.layers.0.mlp.up_proj.g_idx"][5] = 2
    write_shards(tmp_path / "quantized", tensors, 1)
    with pytest.raises(ModelError, match=r"up_proj\.g_idx: needed groups 0 to 1, found 0 to 2"):
        TargetModel.load(make_config(tmp_path / "quantized", [1]), CPU)


def test_numbers_without_a_quantization_are_refused(tmp_path: Path) -> None:
    make_plain("llama", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS["fp8 blocks"])
    (tmp_path / "plain" / "config.json").replace(tmp_path / "quantized" / "config.json")
    config = make_config(tmp_path / "quantized", [1])
    for check in (lambda: check_quantization(tmp_path / "quantized"), lambda: load_full_target(config, CPU)):
        with pytest.raises(ModelError, match=r"needed weights of 16 bits or more, or scales, found .* F8_E4M3"):
            check()


@pytest.mark.parametrize("num_bytes", [0, 7, 100])
def test_a_truncated_file_is_named(num_bytes: int, tmp_path: Path) -> None:
    make_plain("llama", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS["modelopt"], num_shards=2)
    path = tmp_path / "quantized" / "model-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=f"{path.name}: needed a safetensors file"):
        check_quantization(tmp_path / "quantized")
    path.unlink()
    with pytest.raises(ModelError, match=f"{path.name}: needed a safetensors file, found none"):
        check_quantization(tmp_path / "quantized")


def test_experts_in_one_tensor_are_dequantized_one_by_one(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(3, 200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 3, generator=generator)
    save_file({"experts.down_proj": numbers, "experts.down_proj_scale_inv": scales}, tmp_path / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    found = open_dequantized(tmp_path, CPU, torch.float32)["experts.down_proj"][...]
    for index in range(3):
        assert torch.equal(found[index], multiply(read_float8(numbers[index]), scales[index], 128, 128))


def test_a_quantized_head_is_dequantized_for_the_drafter(tmp_path: Path) -> None:
    make_plain("qwen3", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS["fp8 blocks"])
    tensors = read_all(tmp_path / "quantized")
    head = in_blocks("lm_head.weight", tensors.pop("lm_head.weight"), "_scale_inv")
    write_shards(tmp_path / "quantized", tensors | head, 1)
    _, found = load_embedding_and_head(make_config(tmp_path / "quantized", [1]), CPU)
    expected = multiply(read_float8(head["lm_head.weight"]), head["lm_head.weight_scale_inv"], *BLOCK)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("shape", [(2, 3), (2, 1, 3, 1)])
def test_blocks_of_128_are_cut_at_the_ends(shape: tuple[int, ...], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    numbers = torch.randn(200, 300, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=generator)
    tensors = {"a.weight": numbers, "a.weight_scale": scales, "a.bias": ones(200)}
    save_file(tensors, tmp_path / "model.safetensors")
    quantization = {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    found = open_dequantized(tmp_path, CPU, torch.float32)
    assert found.keys() == {"a.weight", "a.bias"}
    assert torch.equal(found["a.weight"][...], multiply(read_float8(numbers), scales, 128, 128))


def test_a_model_that_answers_has_the_dtype_and_the_end_tokens_of_its_folder(tmp_path: Path) -> None:
    make_plain("llama", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS["fp8 blocks"])
    (tmp_path / "quantized" / "generation_config.json").write_text('{"eos_token_id": [5, 7]}')
    content = json.loads((tmp_path / "quantized" / "config.json").read_text())
    for dtype in (torch.float32, torch.bfloat16):
        content["dtype"] = str(dtype).removeprefix("torch.")
        (tmp_path / "quantized" / "config.json").write_text(json.dumps(content))
        model = load_model(tmp_path / "quantized", CPU)
        assert model.dtype == dtype and model.generation_config is not None
        assert model.generation_config.eos_token_id == [5, 7]


def test_weights_are_rounded_once_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    make_plain("llama", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS["fp8 blocks"])
    config = make_config(tmp_path / "quantized", [1])
    half = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="bfloat16"))
    exact, rounded = (dict(TargetModel.load(each, CPU).decoder.named_parameters()) for each in (config, half))
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
