"""Quantized checkpoints of every published layout give the numbers of the rule, bit for bit; damaged ones are errors."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import ones
from transformers import GptOssConfig, GptOssForCausalLM

from common.errors import ModelError
from common.quantized_weights import check_quantization
from launch.decoding.full_target import load_full_target
from services.drafter.model.frozen import load_embedding_and_head
from services.target.model import TargetModel
from tests.builders.quantized_folders import BLOCK, GROUP, LAYOUTS, in_blocks, quantize_folder, write_shards
from tests.builders.whole_models import CPU, SHAPE, VOCABULARY, make_config, make_folder

Floats = NDArray[np.float32]
LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def read_float8(numbers: torch.Tensor) -> Floats:
    """Read E4M3 by its bits: a sign, four bits of exponent with bias 7, three of mantissa."""
    bits = numbers.view(torch.uint8).numpy().astype(np.int32)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    size = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(bits >> 7, -size, size).astype(np.float32)


def multiply(numbers: Floats, scales: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Multiply each number by the scale of its block of rows x columns."""
    factors = scales.float().numpy().reshape(-(-numbers.shape[0] // rows), -(-numbers.shape[1] // columns))
    product = np.empty_like(numbers)
    for row in range(numbers.shape[0]):
        for column in range(numbers.shape[1]):
            product[row, column] = numbers[row, column] * factors[row // rows, column // columns]
    return torch.from_numpy(product)


def read_int4(words: torch.Tensor) -> Floats:
    unsigned = words.numpy().view(np.uint32)
    return np.stack([(unsigned >> np.uint32(4 * index)) & 15 for index in range(8)], -1).reshape(len(words), -1) - np.float32(8)


def read_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return [experts, columns, rows]."""
    codes = np.stack([blocks.numpy() & 15, blocks.numpy() >> 4], -1).reshape(*blocks.shape[:-1], 32)
    values = np.array([*LEVELS, *(-level for level in LEVELS)])[codes] * 2.0 ** (
        exponents.numpy()[..., None].astype(float) - 127
    )
    experts, rows = values.shape[:2]
    return torch.from_numpy(values.reshape(experts, rows, -1).astype(np.float32)).transpose(1, 2)


def nibble(words: torch.Tensor, row: int, column: int, position: int) -> int:
    return (int(words[row, column]) >> (4 * position)) & 15


def read_groups(tensors: dict[str, torch.Tensor], module: str, layout: str) -> torch.Tensor:
    """Return a weight of AWQ or GPTQ [out, in], one element after the other."""
    qweight, qzeros, scales = (tensors[module + part] for part in ("qweight", "qzeros", "scales"))
    groups = tensors.get(f"{module}g_idx")
    num_rows, num_columns = len(qweight) * (8 if groups is not None else 1), scales.shape[1]
    weight = np.empty((num_columns, num_rows), dtype=np.float32)
    for row in range(num_rows):
        group = row // GROUP if groups is None else int(groups[row])
        for column in range(num_columns):
            if groups is None:
                position = (0, 4, 1, 5, 2, 6, 3, 7)[column % 8]
                number, zero = (nibble(qweight, row, column // 8, position), nibble(qzeros, group, column // 8, position))
            else:
                number, zero = nibble(qweight, row // 8, column, row % 8), nibble(qzeros, group, column // 8, column % 8)
                zero += layout != "gptq_v2"
            weight[column, row] = np.float32(number - zero) * np.float32(scales[group, column])
    return torch.from_numpy(weight)


def dequantize(tensors: dict[str, torch.Tensor], layout: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a plain checkpoint by the published rules, written apart from the code of the loader."""
    plain = {}
    for name, tensor in tensors.items():
        if name.endswith(("_scale", "_scale_inv", "_scales", "_shape", "qzeros", ".scales", "g_idx")):
            continue
        if name.endswith("qweight"):
            plain[name.removesuffix("qweight") + "weight"] = read_groups(tensors, name.removesuffix("qweight"), layout)
            continue
        if name.endswith("_blocks"):
            plain[name.removesuffix("_blocks")] = read_mxfp4(tensor, tensors[name.replace("_blocks", "_scales")])
        elif name.endswith("_packed"):
            scales = tensors[name.replace("_packed", "_scale")]
            plain[name.removesuffix("_packed")] = multiply(read_int4(tensor), scales, 1, GROUP)
        elif tensor.dtype in (torch.float8_e4m3fn, torch.int8):
            scales = tensors.get(f"{name}_scale", tensors.get(f"{name}_scale_inv"))
            assert scales is not None
            numbers = read_float8(tensor) if tensor.dtype != torch.int8 else tensor.numpy().astype(np.float32)
            rows, columns = tensor.shape
            block = (
                BLOCK if "blocks" in layout else (rows, columns) if "tensor" in layout or layout == "modelopt" else (1, columns)
            )
            plain[name] = multiply(numbers, scales, *block)
        else:
            plain[name] = tensor
    return plain


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


def test_a_quantized_head_is_dequantized_for_the_drafter(tmp_path: Path) -> None:
    make_plain("qwen3", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS["fp8 blocks"])
    tensors = read_all(tmp_path / "quantized")
    head = in_blocks("lm_head.weight", tensors.pop("lm_head.weight"), "_scale_inv")
    write_shards(tmp_path / "quantized", tensors | head, 1)
    _, found = load_embedding_and_head(make_config(tmp_path / "quantized", [1]), CPU)
    expected = multiply(read_float8(head["lm_head.weight"]), head["lm_head.weight_scale_inv"], *BLOCK)
    assert torch.equal(found, expected)


def test_weights_are_rounded_once_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    make_plain("llama", tmp_path / "plain")
    quantize_folder(tmp_path / "plain", tmp_path / "quantized", LAYOUTS["fp8 blocks"])
    config = make_config(tmp_path / "quantized", [1])
    half = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="bfloat16"))
    exact, rounded = (dict(TargetModel.load(each, CPU).decoder.named_parameters()) for each in (config, half))
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)
