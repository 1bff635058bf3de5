"""A target's causal attention on one GPU, by the kernels that torch chooses from: the first call at a shape, and later ones.

    python -m launch.bench attention [--tokens 16384]

Rows of one length as in a batch of a full token budget, bfloat16, grouped heads, no mask.

B rows, S padded length, N heads, D head size.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from launch.bench.drafter import time_ms

DEVICE = torch.device("cuda")
HEADS = {"qwen3_8b": (32, 8, 128), "qwen3_6_27b": (24, 4, 256)}  # of queries, of keys and values, size
KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)
OTHER_ROWS = 8  # shapes whose first call is timed: one multiple of 8 tokens apart


def attend(kernel: SDPBackend, heads: tuple[int, int, int], num_rows: int, length: int) -> Callable[[], torch.Tensor]:
    """A call as transformers makes it: projections [B, S, N, D], transposed."""
    num_queries, num_keys, size = heads
    generator = torch.Generator(DEVICE).manual_seed(0)

    def made(num_heads: int) -> torch.Tensor:
        shape = (num_rows, length, num_heads, size)
        return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16, generator=generator).transpose(1, 2)

    query, key, value = made(num_queries), made(num_keys), made(num_keys)

    @torch.inference_mode()
    def call() -> torch.Tensor:
        with sdpa_kernel(kernel):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return call


def first_call_ms(call: Callable[[], torch.Tensor]) -> float:
    """Of the host and the device together."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) * 1e3


def measure(shape: str, length: int, num_rows: int) -> str:
    """One line: milliseconds of later calls and TFLOP/s, and what the first call at each of some new shapes took."""
    heads = HEADS[shape]
    flops = 4 * heads[0] * heads[2] * num_rows * length * (length + 1) / 2
    cells, outputs = [], []
    for name, kernel in KERNELS.items():
        call = attend(kernel, heads, num_rows, length)
        try:
            outputs.append(call().float())
        except RuntimeError as error:
            cells.append(f"{name} does not run it: {str(error).strip().splitlines()[0]}")
            continue
        later_ms = time_ms(call, 20)
        lengths = [length - 8 * (place + 1) for place in range(OTHER_ROWS)]
        firsts = [first_call_ms(attend(kernel, heads, num_rows, other)) for other in lengths]
        first_ms = statistics.median(firsts) - later_ms
        rate = f"{later_ms:.3f} ms, {flops / later_ms * 1e-9:.0f} TFLOP/s"
        cells.append(f"{name} {rate}, first {first_ms:+.1f} ms (max {max(firsts):.1f})")
    if len(outputs) == len(KERNELS):
        cells.append(f"largest difference {(outputs[0] - outputs[1]).abs().max().item():.4f}")
    return f"{shape:12} {num_rows:4} x {length:<5} {'; '.join(cells)}"


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m launch.bench attention", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="of a batch")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench attention: needed a CUDA GPU, found none")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    for shape in HEADS:
        for length in LENGTHS:
            print(measure(shape, length, options.tokens // length), flush=True)
    return 0
