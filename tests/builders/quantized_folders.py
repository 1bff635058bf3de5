"""Quantized checkpoints in the layouts that others publish, written from a plain folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

Write = Callable[[str, torch.Tensor], dict[str, torch.Tensor]]  # name of a weight, float32 [..., rows, columns] -> its tensors

BLOCK = (20, 12)  # of 32 rows or 48 columns the last blocks are cut
GROUP = 16
EXTREMES = (("min", (None, 0.0)), ("max", (0.0, None)))
SKIPPED = ["lm_head", "model.visual", "model.language_model.layers.0.linear_attn.conv1d"]  # as wrappers name them


class Layout(NamedTuple):
    """One published layout."""

    write: Write
    config: dict[str, Any]  # quantization_config
    file: str = "config.json"  # that holds it


def in_blocks(
    name: str, weight: torch.Tensor, suffix: str = "_scale_inv", dtype: torch.dtype = torch.float32
) -> dict[str, Any]:
    rows, columns = (-(-size // block) for size, block in zip(weight.shape, BLOCK, strict=True))
    scale = torch.empty(rows, columns)
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for row in range(rows):
        for column in range(columns):
            part = (slice(row * BLOCK[0], (row + 1) * BLOCK[0]), slice(column * BLOCK[1], (column + 1) * BLOCK[1]))
            scale[row, column] = (weight[part].abs().max() / 448).to(dtype)
            numbers[part] = (weight[part] / scale[row, column]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {name: numbers, f"{name}{suffix}": scale.to(dtype)}


def per_tensor(name: str, weight: torch.Tensor, suffix: str, extra: str, *shape: int) -> dict[str, torch.Tensor]:
    scale = weight.abs().max() / 448
    numbers = (weight / scale).to(torch.float8_e4m3fn)
    module = name.removesuffix("weight")
    return {name: numbers, f"{name}{suffix}": scale.reshape(shape), f"{module}{extra}": torch.tensor(0.5)}


def per_channel(name: str, weight: torch.Tensor, *shape: int) -> dict[str, torch.Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    return {name: (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn), f"{name}_scale": scale.reshape(-1, *shape)}


def int8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    return {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}


def packed_int(name: str, weight: torch.Tensor, bits: int) -> dict[str, torch.Tensor]:
    """Numbers of four bits from -8 to 7, each stored 8 larger than it is; those of eight bits likewise."""
    groups, half = weight.reshape(len(weight), -1, GROUP), 1 << (bits - 1)
    scale = (groups.abs().amax(2) / (half - 1)).bfloat16()
    codes = (groups / scale[:, :, None]).round().clamp(-half, half - 1).to(torch.int64).flatten(1) + half
    return {f"{name}_packed": to_words(codes, bits), f"{name}_scale": scale, f"{name}_shape": torch.tensor(weight.shape)}


def to_words(codes: torch.Tensor, bits: int = 4) -> torch.Tensor:
    """Pack unsigned numbers [..., columns] into int32, the first in the lowest bits."""
    number = 32 // bits
    packed = sum(codes[..., index::number].to(torch.int64) << (bits * index) for index in range(number))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def in_groups(weight: torch.Tensor, groups: torch.Tensor, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return numbers [in, out], zero points [groups, out] and scales of a weight [out, in] whose columns belong to groups."""
    high_code = (1 << bits) - 1
    members = [weight.T[groups == group] for group in range(int(groups.max()) + 1)]
    low, high = (torch.stack([getattr(rows, name)(0).values.clamp(*bound) for rows in members]) for name, bound in EXTREMES)
    scales = ((high - low) / high_code).half()
    zeros = (-low / scales).round().clamp(1, high_code)
    return (weight.T / scales[groups] + zeros[groups]).round().clamp(0, high_code).int(), zeros.int(), scales


def awq(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Bits hold columns 0, 2, 4, 6, 1, 3, 5, 7 of eight."""
    numbers, zeros, scales = in_groups(weight, torch.arange(weight.shape[1]) // GROUP)
    qweight, qzeros = (
        to_words(each.reshape(len(each), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1)) for each in (numbers, zeros)
    )
    module = name.removesuffix("weight")
    return {f"{module}qweight": qweight, f"{module}qzeros": qzeros, f"{module}scales": scales}


def gptq(name: str, weight: torch.Tensor, ordered: bool, offset: int, bits: int = 4) -> dict[str, torch.Tensor]:
    groups = torch.arange(weight.shape[1]) // GROUP
    groups = groups[torch.randperm(len(groups))] if ordered else groups
    numbers, zeros, scales = in_groups(weight, groups, bits)
    module = name.removesuffix("weight")
    found = {"qweight": to_words(numbers.T, bits).T, "qzeros": to_words(zeros - offset, bits), "scales": scales}
    return {f"{module}{part}": tensor for part, tensor in found.items()} | {f"{module}g_idx": groups.int()}


def mxfp4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Experts [experts, in, out] of gpt-oss: 32 numbers along `in` share an exponent, two of them are a byte."""
    blocks = weight.transpose(1, 2).contiguous().reshape(len(weight), weight.shape[2], -1, 32)
    exponents = (blocks.abs().amax(3).log2().floor() - 2).clamp(-127, 127)
    levels = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = ((blocks.abs() / exponents.exp2()[..., None])[..., None] - levels).abs().argmin(-1) + 8 * (blocks < 0)
    packed = (codes[..., 0::2] | (codes[..., 1::2] << 4)).to(torch.uint8)
    return {f"{name}_blocks": packed, f"{name}_scales": (exponents + 127).to(torch.uint8)}


def compressed(kind: str, format: str, num_bits: int = 8, **weights: Any) -> dict[str, Any]:
    """The keys that llm-compressor writes."""
    scheme = {"num_bits": num_bits, "type": kind, "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    keys: dict[str, Any] = {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}
    return keys | {"ignore": SKIPPED, "kv_cache_scheme": None, "quantization_status": "compressed"}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "modules_to_not_convert": SKIPPED}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": SKIPPED}
LAYOUTS = {
    "fp8 blocks": Layout(
        lambda name, weight: in_blocks(name, weight, "_scale_inv"),
        FP8 | {"weight_block_size": list(BLOCK)},
    ),
    "fp8 blocks, bfloat16 scales": Layout(
        lambda name, weight: in_blocks(name, weight, "_scale_inv", torch.bfloat16),
        FP8 | {"weight_block_size": list(BLOCK)},
    ),
    "fp8 per tensor": Layout(
        lambda name, weight: per_tensor(name, weight, "_scale_inv", "activation_scale"),
        FP8 | {"activation_scheme": "static", "weight_block_size": None},
    ),
    "compressed per tensor": Layout(
        lambda name, weight: per_tensor(name, weight, "_scale", "input_scale", 1),
        compressed("float", "float-quantized", strategy="tensor"),
    ),
    "compressed per channel": Layout(
        lambda name, weight: per_channel(name, weight, 1), compressed("float", "float-quantized", strategy="channel")
    ),
    "compressed blocks": Layout(
        lambda name, weight: in_blocks(name, weight, "_scale"),
        compressed("float", "float-quantized", strategy="block", block_structure=list(BLOCK)),
    ),
    "compressed int8": Layout(int8, compressed("int", "int-quantized", strategy="channel")),
    "compressed int4": Layout(
        lambda name, weight: packed_int(name, weight, 4),
        compressed("int", "pack-quantized", 4, strategy="group", group_size=GROUP),
    ),
    "compressed int8 packed": Layout(
        lambda name, weight: packed_int(name, weight, 8),
        compressed("int", "pack-quantized", 8, strategy="group", group_size=GROUP),
    ),
    "modelopt": Layout(
        lambda name, weight: per_tensor(name, weight, "_scale", "input_scale"),
        {"producer": {"name": "modelopt"}, "quantization": MODELOPT},
        "hf_quant_config.json",
    ),
    "modelopt per channel": Layout(
        per_channel, {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": SKIPPED}
    ),
    "awq": Layout(awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}),
    "gptq": Layout(lambda name, weight: gptq(name, weight, False, 1), GPTQ),
    "gptq ordered": Layout(lambda name, weight: gptq(name, weight, True, 1), GPTQ | {"desc_act": True}),
    "gptq of 8 bits": Layout(lambda name, weight: gptq(name, weight, False, 1, 8), GPTQ | {"bits": 8}),
    "gptq_v2": Layout(lambda name, weight: gptq(name, weight, True, 0), GPTQ | {"checkpoint_format": "gptq_v2"}),
    "mxfp4": Layout(mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": SKIPPED}),
}


def quantize_folder(plain: Path, folder: Path, layout: Layout, num_shards: int = 1) -> None:
    """Write `folder` with the linear weights of `plain`, or the experts of gpt-oss, in one layout."""
    shutil.copytree(plain, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if _is_quantized(name, layout)]:
        tensors |= layout.write(name, tensors.pop(name).float())
    write_shards(folder, tensors, num_shards)
    path = folder / layout.file
    content = json.loads(path.read_text()) | {"quantization_config": layout.config} if path.is_file() else layout.config
    path.write_text(json.dumps(content))


def write_shards(folder: Path, tensors: dict[str, torch.Tensor], num_shards: int) -> None:
    """Deal the tensors out one after the other, so that numbers and scales of a weight are in different files."""
    (folder / "model.safetensors").unlink()
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    names = sorted(tensors)
    files = [f"model-{index + 1:05d}-of-{num_shards:05d}.safetensors" for index in range(num_shards)]
    files = files if num_shards > 1 else ["model.safetensors"]
    for index, file in enumerate(files):
        save_file({name: tensors[name] for name in names[index::num_shards]}, folder / file, {"format": "pt"})
    if num_shards > 1:
        weight_map = {name: files[index % num_shards] for index, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _is_quantized(name: str, layout: Layout) -> bool:
    if layout.write is mxfp4:
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return name.endswith("_proj.weight") and ".visual." not in name
