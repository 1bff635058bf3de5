"""The quantized weights of a checkpoint: which tensors belong to each, found in the headers of its safetensors files.

Every layout is proven here, before a process starts: a number without its scale, a scale of another shape, or a tensor beside
them that would change the weight, is an error. Nothing here loads torch.
"""

import json
import math
from pathlib import Path
from typing import NamedTuple

from common.errors import ModelError
from common.quantization import ALL, FLOAT8, INT8, Rule, read_rule

# The shape of a packed weight follows from its numbers; the others scale activations, keys and values.
_IGNORED = ("input_scale", "activation_scale", "output_scale", "k_scale", "v_scale", "q_scale", "weight_shape")
_SCALE_TYPES = ("F64", "F32", "F16", "BF16", "F8_E8M0")
_MAX_HEADER_BYTES = 100_000_000  # the limit of safetensors


class Header(NamedTuple):
    """Type, shape and file of a tensor, by its safetensors file."""

    type: str
    shape: tuple[int, ...]
    file: Path


class QuantizedWeight(NamedTuple):
    """A weight of `shape` [..., rows, columns], as the checkpoint orders them, and the names of its tensors."""

    shape: tuple[int, ...]
    numbers: str
    scales: str
    block: tuple[int, int]  # rows and columns that share a scale
    rule: Rule
    zeros: str = ""  # packed zero points [groups, columns], if the rule has some
    groups: str = ""  # group of every row, where it is not the next one after so many rows

    @property
    def tensors(self) -> list[str]:
        return [name for name in (self.numbers, self.scales, self.zeros, self.groups) if name]

    @property
    def grid(self) -> tuple[int, int]:
        """Number of scales along rows and columns."""
        return _grid(self.shape, self.block)


def check_quantization(folder: Path) -> None:
    """Raise ModelError if `folder` holds quantized weights that cannot be read right, as far as its files are there."""
    if read_rule(folder) is not None and any(folder.glob("*.safetensors")):
        find_quantized_weights(folder)
    elif any(folder.glob("*.safetensors")):
        _refuse_others(folder, None, {}, read_headers(folder))


def find_quantized_weights(folder: Path) -> dict[str, QuantizedWeight]:
    """Return every quantized weight under the name that a plain checkpoint gives it; none if the JSON files name no rule.

    Raises:
        ModelError: a file is missing or damaged, the rule is unknown, or the tensors do not fit it.
    """
    rule = read_rule(folder)
    if rule is None:
        return {}
    headers = read_headers(folder)
    found = {
        name.removesuffix(rule.numbers) + rule.plain: _make_weight(folder, name, rule, headers)
        for name, header in headers.items()
        if header.type in rule.types and name.endswith(rule.numbers)
    }
    _refuse_others(folder, rule, found, headers)
    return found


def find_consumed(folder: Path) -> set[str]:
    """Return the names of tensors that a loader does not see: numbers and scales of quantized weights, and ignored tensors."""
    weights = find_quantized_weights(folder).values()
    ignored = {name for name in read_headers(folder) if is_ignored(name)} if weights else set()
    return ignored.union(*(weight.tensors for weight in weights))


def is_ignored(name: str) -> bool:
    """Return whether a tensor changes no weight: activations are not quantized here, nor are keys and values in a cache."""
    return name.rpartition(".")[2] in _IGNORED


def read_headers(folder: Path) -> dict[str, Header]:
    """Read the header of every safetensors file that the index names, or else of model.safetensors.

    Raises:
        ModelError: a file is missing or damaged.
    """
    path = folder / "model.safetensors.index.json"
    headers: dict[str, Header] = {}
    try:
        files = sorted(set(json.loads(path.read_text())["weight_map"].values())) if path.is_file() else ["model.safetensors"]
        for file in files:
            path = folder / file
            with path.open("rb") as stream:
                content = json.loads(stream.read(min(int.from_bytes(stream.read(8), "little"), _MAX_HEADER_BYTES)))
            content.pop("__metadata__", None)
            headers |= {name: Header(each["dtype"], tuple(each["shape"]), path) for name, each in content.items()}
    except OSError as error:
        raise ModelError(f"{path}: needed a safetensors file, found none: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: needed a safetensors file or its index, found: {error!r}") from error
    return headers


def _make_weight(folder: Path, numbers: str, rule: Rule, headers: dict[str, Header]) -> QuantizedWeight:
    prefix = numbers.removesuffix(rule.numbers)
    scales, shape = prefix + rule.scales, _weight_shape(headers[numbers].shape, rule)
    if scales not in headers:
        raise ModelError(f"{folder}: needed {scales}, the scales of {numbers} ({headers[numbers].type}), found none")
    found = headers[scales]
    if found.type not in (*_SCALE_TYPES, *(("U8",) if rule.coding == "mxfp4" else ())):
        raise ModelError(f"{folder}: needed {scales} of type {', '.join(_SCALE_TYPES)}, found {found.type}")
    needed: list[tuple[int, ...]] = []
    if len(shape) > 1:
        for block in sorted(rule.blocks):
            shapes = _scale_shapes(shape, block)
            if found.shape in shapes:
                weight = QuantizedWeight(shape, numbers, scales, block, rule)
                return _add_zeros(folder, prefix, weight, headers) if rule.has_zeros else weight
            needed += shapes[:1]
    wanted = " or ".join(str(list(each)) for each in needed) or "a weight of rows and columns"
    raise ModelError(f"{folder}: needed {scales} {wanted} for {numbers} {list(shape)}, found {list(found.shape)}")


def _add_zeros(folder: Path, prefix: str, weight: QuantizedWeight, headers: dict[str, Header]) -> QuantizedWeight:
    zeros, groups = f"{prefix}qzeros", f"{prefix}g_idx"
    needed: dict[str, tuple[int, ...]] = {zeros: (weight.grid[0], weight.shape[1] // weight.rule.per_element)}
    if groups in headers or weight.rule.is_ordered:
        needed[groups] = (weight.shape[0],)
    for name, shape in needed.items():
        found = headers.get(name)
        if found is None or found[:2] != ("I32", shape):
            what = "none" if found is None else f"{found.type} {list(found.shape)}"
            raise ModelError(f"{folder}: needed {name} I32 {list(shape)}, found {what}")
    return weight._replace(zeros=zeros, groups=groups if groups in needed else "")


def _weight_shape(shape: tuple[int, ...], rule: Rule) -> tuple[int, ...]:
    if rule.coding.startswith("gptq") and shape:  # packed along the rows
        return (shape[0] * rule.per_element, *shape[1:])
    if rule.coding == "mxfp4":  # [..., rows, blocks, bytes of a block]
        shape = (*shape[:-2], math.prod(shape[-2:]))
    return (*shape[:-1], shape[-1] * rule.per_element) if shape else shape


def _grid(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (1 if each == ALL else -(-size // each) for size, each in zip(shape[-2:], block, strict=True))
    return rows, columns


def _scale_shapes(shape: tuple[int, ...], block: tuple[int, int]) -> list[tuple[int, ...]]:
    """Return the shapes that scales may have; published writers leave out axes of one element, or keep more of them."""
    lead, (rows, columns) = shape[:-2], _grid(shape, block)
    shapes = [(rows, columns), (rows, 1, columns, 1)]
    shapes += [(rows,)] if columns == 1 else []
    shapes += [()] if rows == columns == 1 else []
    return [lead + each for each in shapes]


def _refuse_others(folder: Path, rule: Rule | None, found: dict[str, QuantizedWeight], headers: dict[str, Header]) -> None:
    """Raise ModelError for quantized numbers that follow no rule, and for unknown tensors beside a quantized weight."""
    known = {name for weight in found.values() for name in weight.tensors}
    for name, header in headers.items():
        if name in known or is_ignored(name):
            continue
        if header.type in FLOAT8 + INT8:
            raise ModelError(f"{folder}: needed weights of 16 bits or more, or scales, found {name} {header.type}")
        module, _, last = name.rpartition(".")
        owners = [f"{module}.{last[:end]}" for end, letter in enumerate(last) if letter == "_"] + [f"{module}.weight"]
        orphan = rule is not None and name.endswith(rule.scales if rule.plain else f"weight{rule.scales}")
        if orphan or (not last.endswith("bias") and any(owner in found for owner in owners)):
            raise ModelError(f"{folder}: needed quantized weights of numbers and scales only, found {name} beside them")
