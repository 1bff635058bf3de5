"""The published rules of quantization, element by element: the reference of the loader, written apart from it."""

import numpy as np
import torch
from numpy.typing import NDArray

from tests.builders.quantized_folders import BLOCK, GROUP

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


def read_packed(words: torch.Tensor, bits: int) -> Floats:
    rows, columns = words.shape[0], words.shape[1] * 32 // bits
    codes = [
        read_code(words, row, column * bits // 32, column % (32 // bits), bits)
        for row in range(rows)
        for column in range(columns)
    ]
    return np.array(codes, dtype=np.float32).reshape(rows, columns) - np.float32(2 ** (bits - 1))


def read_mxfp4(blocks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Return [experts, columns, rows]."""
    codes = np.stack([blocks.numpy() & 15, blocks.numpy() >> 4], -1).reshape(*blocks.shape[:-1], 32)
    values = np.array([*LEVELS, *(-level for level in LEVELS)])[codes] * 2.0 ** (
        exponents.numpy()[..., None].astype(float) - 127
    )
    experts, rows = values.shape[:2]
    return torch.from_numpy(values.reshape(experts, rows, -1).astype(np.float32)).transpose(1, 2)


def read_code(words: torch.Tensor, row: int, column: int, position: int, bits: int) -> int:
    return (int(words[row, column]) >> (bits * position)) & ((1 << bits) - 1)


def read_groups(tensors: dict[str, torch.Tensor], module: str, layout: str) -> torch.Tensor:
    """Return a weight of AWQ or GPTQ [out, in], one element after the other."""
    qweight, qzeros, scales = (tensors[module + part] for part in ("qweight", "qzeros", "scales"))
    groups, bits = tensors.get(f"{module}g_idx"), 8 if "8" in layout else 4
    number = 32 // bits
    num_rows, num_columns = len(qweight) * (number if groups is not None else 1), scales.shape[1]
    weight = np.empty((num_columns, num_rows), dtype=np.float32)
    for row in range(num_rows):
        group = row // GROUP if groups is None else int(groups[row])
        for column in range(num_columns):
            if groups is None:
                position = (0, 4, 1, 5, 2, 6, 3, 7)[column % 8]
                code, zero = (read_code(*at, column // 8, position, 4) for at in ((qweight, row), (qzeros, group)))
            else:
                code = read_code(qweight, row // number, column, row % number, bits)
                zero = read_code(qzeros, group, column // number, column % number, bits) + (layout != "gptq_v2")
            weight[column, row] = np.float32(code - zero) * np.float32(scales[group, column])
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
            plain[name.removesuffix("_packed")] = multiply(read_packed(tensor, 8 if "int8" in layout else 4), scales, 1, GROUP)
        elif tensor.dtype in (torch.float8_e4m3fn, torch.int8):
            scales = tensors[f"{name}_scale" if f"{name}_scale" in tensors else f"{name}_scale_inv"]
            numbers = read_float8(tensor) if tensor.dtype != torch.int8 else tensor.numpy().astype(np.float32)
            rows, columns = tensor.shape
            block = BLOCK if "blocks" in layout else (1, columns) if scales.numel() > 1 else (rows, columns)
            plain[name] = multiply(numbers, scales, *block)
        else:
            plain[name] = tensor
    return plain
