"""The rule by which a checkpoint is quantized, from its JSON files: nothing here reads a tensor or loads torch.

A rule says how the tensors of a weight are named and typed, and how many rows and columns of the weight share a scale. A
weight is its number, less its zero point where it has one, times its scale, in float32. What has no rule is refused by name.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from common.errors import ModelError
from common.run_dir import read_object
from common.target_shape import read_target_config

FLOAT8, INT8 = ("F8_E4M3", "F8_E5M2"), ("I8",)  # types in a safetensors file
ALL = 0  # rows or columns of a block: as many as the weight has
_KEYS = ("quantization_config", "compression_config", "quantization")
_MX_BLOCK = (1, 32)
_MODELOPT_BLOCKS = {"FP8": (ALL, ALL), "FP8_PER_CHANNEL_PER_TOKEN": (1, ALL), "FP8_PB_WO": (128, 128)}
_KNOWN = "fp8, compressed-tensors, modelopt, mxfp4, awq and gptq in a form known here"
_PACKED_BITS = (4, 8)


class Rule(NamedTuple):
    """Suffixes are added to the name of the weight without `plain`."""

    coding: Literal["plain", "mxfp4", "packed", "awq", "gptq", "gptq_v2"]  # of the numbers
    numbers: str  # suffix of the numbers, such as "_packed"
    scales: str
    types: tuple[str, ...]  # of the numbers
    blocks: frozenset[tuple[int, int]]  # rows and columns of a stored weight that share a scale
    per_element: int = 1  # weights in an element of the numbers
    plain: str = ""  # suffix that a plain checkpoint has in the place of `numbers`
    is_ordered: bool = False  # rows belong to groups by a table that must be there

    @property
    def has_zeros(self) -> bool:
        return self.coding in ("awq", "gptq", "gptq_v2")

    @property
    def is_transposed(self) -> bool:
        """Rows of the stored weight are columns of the model's."""
        return self.has_zeros or self.coding == "mxfp4"


class _Weights(msgspec.Struct):
    """One entry `weights` of compressed-tensors; keys that change no weight are not read."""

    num_bits: int
    type: str
    strategy: str | None = None
    symmetric: bool = True
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    actorder: bool | str | None = None


class _UnknownError(Exception):
    """Says of what kind the quantization is."""


def read_rule(folder: Path) -> Rule | None:
    """Return the rule of the weights of `folder`, None if its JSON files name no quantization.

    Raises:
        ModelError: a quantization without a rule here, or two that differ.
    """
    if not (folder / "config.json").is_file():
        return None
    found = list(_find(read_target_config(folder)[0]))
    path = folder / "hf_quant_config.json"
    if not found and path.is_file():
        found = [("hf_quant_config.json", {"quant_method": "modelopt"} | read_object(path, ModelError))]
    if not found:
        return None
    key, content = found[0]
    try:
        if any(other != content for _, other in found):
            raise _UnknownError(f"two that differ, {' and '.join(name for name, _ in found)}")
        return _make_rule(content)
    except (_UnknownError, msgspec.ValidationError, TypeError, AttributeError) as error:
        raise ModelError(f"model.path: needed plain weights or one of {_KNOWN}, found {key} {error} in {folder}") from error


def _find(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every sign of quantization, however deep in the wrappers of config.json."""
    for key, inner in value.items() if isinstance(value, dict) else ():
        if key in _KEYS and inner:
            yield key, inner
        else:
            yield from _find(inner)


def _make_rule(content: Any) -> Rule:
    if not isinstance(content, dict):
        raise _UnknownError(repr(content))
    content = content | (content.get("quantization") or {})  # older files of modelopt are nested
    method = content.get("quant_method") or ("modelopt" if "quant_algo" in content else None)
    match method:
        case "fp8":
            block = content.get("weight_block_size")
            return Rule("plain", "", "_scale_inv", FLOAT8, frozenset([_block(block) if block else (ALL, ALL)]))
        case "mxfp4":
            return Rule("mxfp4", "_blocks", "_scales", ("U8",), frozenset([_MX_BLOCK]), per_element=2)
        case "modelopt":
            return Rule("plain", "", "_scale", FLOAT8, frozenset(_modelopt_blocks(content)))
        case "compressed-tensors":
            return _compressed_rule(content)
        case "awq" | "gptq":
            return _group_rule(content, method)
    raise _UnknownError(str(method or "of no quant_method"))


def _group_rule(content: dict[str, Any], method: str) -> Rule:
    """Return the rule of AWQ or GPTQ, which store [in, out] with a zero point and a scale for every group of rows."""
    coding: Any = content.get("checkpoint_format") or "gptq" if method == "gptq" else "awq"
    num_bits: Any = content.get("bits", content.get("w_bit"))
    version = content.get("version", "gemm")
    supported = coding in ("gptq", "gptq_v2") and num_bits in _PACKED_BITS
    if not supported and (coding, num_bits, str(version).lower()) != ("awq", 4, "gemm"):
        raise _UnknownError(f"{method} {content.get('checkpoint_format') or version} of {num_bits} bits")
    size = content.get("group_size", content.get("q_group_size"))
    block = (ALL, 1) if size == -1 else _block((size, 1))
    ordered = bool(content.get("desc_act"))
    return Rule(coding, "qweight", "scales", ("I32",), frozenset([block]), 32 // num_bits, "weight", ordered)


def _block(value: Any) -> tuple[int, int]:
    rows, columns = msgspec.convert(value, tuple[int, int])
    if min(rows, columns) < 1:
        raise _UnknownError(f"blocks of {rows} x {columns}")
    return rows, columns


def _modelopt_blocks(content: dict[str, Any]) -> Iterator[tuple[int, int]]:
    algorithm = content.get("quant_algo")
    layers = content.get("quantized_layers") or {}
    for name in [each.get("quant_algo") for each in layers.values()] if algorithm == "MIXED_PRECISION" else [algorithm]:
        if name not in _MODELOPT_BLOCKS:
            raise _UnknownError(f"modelopt {name}")
        yield _MODELOPT_BLOCKS[name]


def _compressed_rule(content: dict[str, Any]) -> Rule:
    for key in ("sparsity_config", "transform_config"):
        if content.get(key) and content[key].get("format") != "dense":
            raise _UnknownError(f"compressed-tensors with a {key}")
    groups = [group for group in content.get("config_groups", {}).values() if group.get("weights")]
    formats = {group.get("format") or content.get("format") for group in groups}
    if not groups or len(formats) != 1:
        raise _UnknownError(f"compressed-tensors of the formats {sorted(map(str, formats))}")
    name = str(*formats)
    weights = [msgspec.convert(group["weights"], _Weights) for group in groups]
    blocks = frozenset(_compressed_block(each) for each in weights)
    kinds = {(each.type, each.num_bits) for each in weights}
    if name in ("float-quantized", "int-quantized", "naive-quantized") and kinds <= {("float", 8), ("int", 8)}:
        return Rule("plain", "", "_scale", FLOAT8 + INT8, blocks)
    if name == "pack-quantized" and kinds in [{("int", num_bits)} for num_bits in _PACKED_BITS]:
        return Rule("packed", "_packed", "_scale", ("I32",), blocks, per_element=32 // weights[0].num_bits)
    found = ", ".join(f"{num_bits}-bit {kind}" for kind, num_bits in sorted(kinds))
    raise _UnknownError(f"compressed-tensors {name} of {found}")


def _compressed_block(weights: _Weights) -> tuple[int, int]:
    if not weights.symmetric:
        raise _UnknownError("compressed-tensors with zero points")
    if weights.actorder == "group":
        raise _UnknownError("compressed-tensors with columns ordered by activation")
    match weights.strategy:
        case None | "tensor":
            return ALL, ALL
        case "channel":
            return 1, ALL
        case "group":
            return 1, _block((1, weights.group_size))[1]
        case "block":
            return _block(weights.block_structure)
    raise _UnknownError(f"compressed-tensors with scales per {weights.strategy}")
