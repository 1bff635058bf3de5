"""Where the time of a hybrid target's layers goes: three of linear attention and one of full attention, as in every four.

    python -m launch.bench hybrid [--rows 8] [--length 2048] [--kernels 25]

Random weights. First the convolution as transformers brings it and as `services.target.linear_attention` does, then the
kernels that take the most time.
"""

import argparse
import inspect
import sys
import time
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from launch.bench.drafter import time_ms
from launch.bench.shapes import random_run
from services.target.model import TargetModel

DEVICE = torch.device("cuda")
NAME = "causal_conv1d_fn"
NUM_LAYERS, NUM_STEPS = 4, 10


def measure(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The rows of the table, as they are measured."""
    tokens, settings = options.rows * options.length, [f"draft.tap_layers=[{NUM_LAYERS - 1}]"]
    model = TargetModel.load(random_run("qwen3_6_27b", options.length, settings), DEVICE)
    input_ids = torch.randint(1000, (options.rows, options.length), device=DEVICE)

    def forward() -> None:
        model.run(input_ids, lambda tap_index, tap: None)

    layer = next(module for module in model.decoder.modules() if type(module).__name__.endswith("GatedDeltaNet"))
    code = sys.modules[type(layer).__module__]
    ours = getattr(code, NAME)
    yield "the kernels of this shape are being tuned", "a minute or two"
    began = time.perf_counter()
    forward()
    torch.cuda.synchronize()
    yield "the first forward, with that", f"{time.perf_counter() - began:.1f} s"
    times_ms: dict[str, list[float]] = {"torch": [], "flash-linear-attention": []}
    for _ in range(3):
        for name, convolution in zip(times_ms, (inspect.unwrap(ours), ours), strict=True):
            setattr(code, NAME, convolution)
            time_ms(forward, 1)
            times_ms[name].append(time_ms(forward, NUM_STEPS))
    for name, times in times_ms.items():
        best = min(times)
        yield f"{NUM_LAYERS} layers, convolution of {name}", f"{best:.2f} ms, {tokens / best * 1e3:.0f} tokens/s"
    yield from profile_kernels(forward, options.kernels)


def profile_kernels(forward: Callable[[], None], num_kernels: int) -> Iterator[tuple[str, str]]:
    """The kernels of one forward by their time."""
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        forward()
        torch.cuda.synchronize()
    kernels = sorted(trace.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    total_us = sum(kernel.self_device_time_total for kernel in kernels)
    yield "all kernels", f"{total_us / 1e3:.2f} ms"
    for kernel in kernels[:num_kernels]:
        spent_us = kernel.self_device_time_total
        yield f"  {kernel.key[:64]}", f"{spent_us / 1e3:.3f} ms, {spent_us / total_us:.1%}, {kernel.count} times"


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m launch.bench hybrid")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--kernels", type=int, default=25, help="shown")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench hybrid: needed a CUDA GPU, found none")
        return 2
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {' '.join(arguments)}")
    for what, value in measure(options):
        print(f"{what:66} {value}", flush=True)
    return 0
