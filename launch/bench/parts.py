"""The parts of the drafter's step on one GPU, each alone, in the ways it could be computed.

    python -m launch.bench parts [--shape qwen3_6_27b] [--tokens 2048] [--anchors 512] [--documents 1] [--steps 10]
        [--only attention products loss kernels]

A row per part and way as soon as it is measured: milliseconds forward and backward, and their rate.
"""

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from common.config import Config
from launch.bench.drafter import DEVICE, Step, make_batch, make_config, random_weight, time_ms
from launch.bench.harness.flex import FlexAttention
from launch.bench.shapes import SHAPES
from services.drafter.model.anchors import choose_blocks
from services.drafter.model.attention import Attend, KeysValues
from services.drafter.model.loss import frozen_head_loss, loss_head
from services.drafter.model.step import HEAD_CHUNK_ROWS, PackedBatch
from services.drafter.model.visibility import BlockAnchors, KeyRuns, key_runs

_NUM_KERNELS = 30
_CHUNKS = (1024, HEAD_CHUNK_ROWS, 2560, 3840)


def random_rows(*shape: int) -> Tensor:
    """bfloat16 rows that gradients flow to."""
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE).requires_grad_()


def differentiated(forward: Callable[[], Tensor], inputs: list[Tensor], num_steps: int) -> tuple[float, float]:
    """Milliseconds of the forward pass and of the backward pass to `inputs`."""
    output = forward()
    gradient = torch.randn_like(output)

    def backward() -> None:
        torch.autograd.grad(output, inputs, gradient, retain_graph=True)

    backward()
    return time_ms(forward, num_steps), time_ms(backward, num_steps)


def line(what: str, flops: float, forward_ms: float, backward_ms: float, backward_flops: float) -> str:
    """A row of the table."""
    rates = flops / forward_ms * 1e-9, backward_flops / backward_ms * 1e-9
    return f"{what:54} {forward_ms:8.3f} ms {rates[0]:5.0f} TFLOP/s   {backward_ms:8.3f} ms {rates[1]:5.0f} TFLOP/s"


def attention(config: Config, batch: PackedBatch, num_steps: int) -> Iterator[str]:
    """One layer's attention; its backward pass counts two and a half times the forward."""
    draft, num_context = config.draft, len(batch.input_ids)
    blocks = choose_blocks(batch.input_ids, batch.loss_mask, batch.cu_seqlens, batch.sample_ids, 0, config)
    places = BlockAnchors(blocks.anchors, batch.cu_seqlens[blocks.documents], blocks.valid)
    num_rows = len(blocks.anchors) * draft.block_size
    query = random_rows(num_rows, draft.num_attention_heads, draft.head_dim)
    keys_values = [random_rows(n, draft.num_key_value_heads, draft.head_dim) for n in (num_context,) * 2 + (num_rows,) * 2]
    inputs = [query, *keys_values]
    for window in sorted({draft.sliding_window, 0}, reverse=True):
        runs = key_runs(places, draft.block_size, window, np.arange(num_rows))
        pairs = float((runs.end - runs.start + runs.own_end - runs.own_start).sum())
        flops = 4.0 * pairs * draft.num_attention_heads * draft.head_dim
        for name, make in attention_ways(runs, num_context, num_rows):
            attend = make()

            def forward(attend: Attend = attend) -> Tensor:
                key, value, own_key, own_value = (rows.transpose(0, 1) for rows in keys_values)
                return attend(query.transpose(0, 1), (key, value), (own_key, own_value))

            try:
                forward_ms, backward_ms = differentiated(forward, inputs, num_steps)
            except Exception as error:  # a way that does not compile here costs its own row only
                yield f"attention, window {window}, {name}: {type(error).__name__}: {str(error)[:200]}"
                continue
            yield line(f"attention, window {window}, {name}", flops, forward_ms, backward_ms, 2.5 * flops)
            yield f"    {by_kernel(lambda: torch.autograd.grad(forward().sum(), inputs))}"


def attention_ways(runs: KeyRuns, num_context: int, num_rows: int) -> Iterator[tuple[str, Callable[[], Attend]]]:
    """What torch offers, and our kernels cut in several ways."""
    from services.drafter.kernels.swept_attention import (  # triton comes with torch for GPUs only
        SweptAttention,
        Tiling,
        Tilings,
    )

    flex = FlexAttention(runs, num_context, num_rows, DEVICE)
    yield "flex", lambda: flex
    yield "flex, keys repeated", lambda: repeated(flex)
    for tilings in (
        Tilings(),
        Tilings(Tiling(128, 128, 8, 2), Tiling(128, 64, 8, 3), Tiling(64, 128, 8, 3)),
        Tilings(Tiling(128, 64, 8, 3), Tiling(128, 64, 8, 2), Tiling(64, 128, 8, 2), num_splits=4),
        Tilings(num_splits=1),
    ):
        name = "/".join(",".join(map(str, tiling)) for tiling in tilings[:3])
        yield f"{name}/{tilings.num_splits}", partial(SweptAttention, runs, num_context, num_rows, DEVICE, tilings)


def repeated(attend: Attend) -> Attend:
    """With a key head for every query head."""

    def call(query: Tensor, context: KeysValues, own: KeysValues) -> Tensor:
        group = query.shape[0] // own[0].shape[0]
        (a, b), (c, d) = ([part.repeat_interleave(group, dim=0) for part in side] for side in (context, own))
        return attend(query, (a, b), (c, d))

    return call


def by_kernel(action: Callable[[], object]) -> str:
    """The kernels of an action and their milliseconds, longest first."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        action()
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    return ", ".join(f"{event.key[:30]} {event.self_device_time_total * 1e-3:.3f}" for event in events[:6])


def products(config: Config, num_context: int, num_rows: int, num_steps: int) -> Iterator[str]:
    """Products that share their input, as several and as one; backward is both gradients."""
    hidden, wide, heads = config.shape.hidden_size, config.draft.intermediate_size, config.draft.head_dim
    query, key = config.draft.num_attention_heads * heads, config.draft.num_key_value_heads * heads
    shared = [
        ("query, key, value", num_rows, hidden, [query, key, key]),
        ("key, value of the context", num_context, hidden, [key, key]),
        ("key, value of context and blocks", num_context + num_rows, hidden, [key, key]),
        ("gate, up", num_rows, hidden, [wide, wide]),
        ("down", num_rows, wide, [hidden]),
        ("output", num_rows, query, [hidden]),
    ]
    for what, rows, inner, widths in shared:
        for parts in [widths] if len(widths) == 1 else [widths, [sum(widths)]]:
            yield product(f"{what}: {rows} x {inner} x {parts}", rows, inner, parts, num_steps)
    taps = hidden * len(config.draft.tap_layers)
    features, weight = random_rows(num_context, taps).detach(), random_rows(hidden, taps)
    flops = 2.0 * num_context * hidden * taps
    times = differentiated(lambda: features @ weight.T, [weight], num_steps)
    yield line(f"features: {num_context} x {taps} x {hidden}, weight gradient only", flops, *times, flops)


def product(what: str, num_rows: int, inner: int, widths: list[int], num_steps: int) -> str:
    """Products of the same rows with several weights."""
    rows, weights = random_rows(num_rows, inner), [random_rows(width, inner) for width in widths]
    outputs = [rows @ weight.T for weight in weights]
    gradients = [torch.randn_like(output) for output in outputs]

    def forward() -> None:
        for weight in weights:
            rows @ weight.T

    def backward() -> None:
        torch.autograd.grad(outputs, [rows, *weights], gradients, retain_graph=True)

    flops = 2.0 * num_rows * inner * sum(widths)
    time_ms(backward, 2)
    return line(what, flops, time_ms(forward, num_steps), time_ms(backward, num_steps), 2 * flops)


def loss(config: Config, num_rows: int, num_steps: int) -> Iterator[str]:
    """The loss through the frozen head, its gradient included, by the rows of a chunk."""
    vocabulary, hidden = config.shape.vocab_size, config.shape.hidden_size
    head = random_weight((vocabulary, hidden), 2)
    num_labels = num_rows // config.draft.block_size * (config.draft.block_size - 1)
    rows, labels = random_rows(num_labels, hidden), torch.randint(vocabulary, (num_labels,), device=DEVICE)
    flops = 4.0 * num_labels * vocabulary * hidden
    kinds: list[Literal["exact", "fp8_logits", "fp8"]] = ["exact", "fp8_logits", "fp8"]
    for kind in kinds:
        of_loss = loss_head(head, kind)
        for chunk in _CHUNKS:
            run = partial(frozen_head_loss, rows, of_loss, labels, chunk)
            time_ms(run, 2)
            ms = time_ms(run, num_steps)
            yield f"{f'loss of {num_labels} rows, {kind}, chunks of {chunk}':54} {ms:8.3f} ms {flops / ms * 1e-9:5.0f} TFLOP/s"
        yield f"    {by_kernel(partial(frozen_head_loss, rows, of_loss, labels, HEAD_CHUNK_ROWS))}"


def kernels(config: Config, batch: PackedBatch) -> Iterator[str]:
    """Where a forward and a backward pass spend their time, by kernel."""
    step = Step(config)
    for _ in range(3):
        step.forward_backward(batch)
        step.clear()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as trace:
        step.forward_backward(batch)
        torch.cuda.synchronize()
    events = sorted(trace.key_averages(), key=lambda event: -event.self_device_time_total)
    total_ms = sum(event.self_device_time_total for event in events) * 1e-3
    yield f"kernels of a forward and backward pass: {total_ms:.1f} ms in all"
    for event in itertools.islice(events, _NUM_KERNELS):
        yield f"  {event.self_device_time_total * 1e-3:8.3f} ms {event.count:5} x {event.key[:110]}"


def main(arguments: list[str]) -> int:
    """Print the rows."""
    parser = argparse.ArgumentParser(prog="python -m launch.bench parts")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_6_27b")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", nargs="+", default=["attention", "products", "loss", "kernels"])
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench parts: needed a CUDA GPU, found none")
        return 2
    config = make_config(options.shape, options.tokens, options.anchors, options.documents)
    batch = make_batch(config, [options.tokens // options.documents] * options.documents)
    num_rows, num_steps = options.anchors * config.draft.block_size, options.steps
    parts = {
        "attention": lambda: attention(config, batch, num_steps),
        "products": lambda: products(config, options.tokens, num_rows, num_steps),
        "loss": lambda: loss(config, num_rows, num_steps),
        "kernels": lambda: kernels(config, batch),
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {' '.join(arguments)}")
    for name in options.only:
        for row in parts[name]():
            print(row, flush=True)
    return 0
