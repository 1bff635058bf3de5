"""The drafter's step on one GPU, beside the rate of its own matrix products in the same run.

    python -m launch.bench drafter [--shape qwen3_6_27b] [--tokens 2048] [--anchors 512]
        [--documents 1] [--accumulation 1] [--steps 20] [--set KEY=VALUE ...]

Random weights and features. Prints a table: times, memory, utilisation, host synchronisations, packed against one by
one, and what fetching from a slot costs.
"""

import itertools
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import torch

from common.config import Config
from common.device.copy_stream import CopyStream, mark_computation
from common.device.memory import GIB
from common.ring.checksum import checksum
from common.ring.layout import SlotLayout
from common.ring.memory import attach, create
from common.ring.ring import page_lock
from launch.bench.harness.table import Rows, make_parser, print_rows
from launch.bench.shapes import SHAPES, random_run
from services.drafter.kernels.fp8_head import Fp8Head
from services.drafter.model.anchors import choose_blocks
from services.drafter.model.batch import PackedBatch
from services.drafter.model.flops import batch_flops
from services.drafter.model.loss import Head, loss_head
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_loss
from services.drafter.model.step_sums import StepSums
from services.drafter.training.optimizer import MasterAdamW

DEVICE = torch.device("cuda")
MIXED_LENGTHS = (0.07, 0.43, 0.2, 0.3)  # parts of a batch of four documents


def make_batch(config: Config, lengths: list[int]) -> PackedBatch:
    """Make documents of random tokens and features, all supervised."""
    num_tokens, random = sum(lengths), torch.Generator(DEVICE).manual_seed(0)
    shape = (num_tokens, len(config.draft.tap_layers), config.shape.hidden_size)
    return PackedBatch(
        hidden_states=torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=random),
        position_ids=torch.cat([torch.arange(length) for length in lengths]).to(DEVICE),
        input_ids=np.random.default_rng(0).integers(0, config.draft.mask_token_id, num_tokens),
        loss_mask=np.ones(num_tokens, dtype=bool),
        cu_seqlens=np.cumsum([0, *lengths]),
        sample_ids=np.arange(len(lengths)),
    )


def random_weight(config: Config, seed: int) -> torch.Tensor:
    """Make a target's embedding or head."""
    random, shape = torch.Generator(DEVICE).manual_seed(seed), (config.shape.vocab_size, config.shape.hidden_size)
    return torch.randn(shape, dtype=torch.bfloat16, device=DEVICE, generator=random).mul_(0.02)


class Step:
    """A draft model in training on one batch, over and over with fresh anchors."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.embedding, self.head = random_weight(config, 1), loss_head(random_weight(config, 2), config.train.head)
        self.model = DraftModel(config, DEVICE)
        self.optimizer: MasterAdamW | None = None
        self.num_done = 0

    def forward(self, batch: PackedBatch) -> StepSums:
        self.num_done += 1
        blocks = choose_blocks(batch, self.num_done, self.config)
        return block_loss(self.model, self.embedding, self.head, batch, blocks, self.config)

    def forward_backward(self, batch: PackedBatch) -> None:
        """Compute the gradients of one batch and drop them."""
        torch.autograd.backward(self.forward(batch).loss)
        self.model.zero_grad()

    def whole(self, batch: PackedBatch, accumulation: int) -> None:
        """Run one optimizer step of so many batches."""
        assert self.optimizer is not None
        for _ in range(accumulation):
            self.optimizer.gradients.accumulate(self.forward(batch))
        self.optimizer.step(self.num_done)

    def train_on(self, head: Head, parts: list[PackedBatch], config: Config) -> tuple[float, torch.Tensor]:
        """Return the mean loss of the parts and their gradients as one flat tensor, without an optimizer."""
        sums = StepSums(torch.zeros(StepSums.size(config.draft.block_size), device=DEVICE))
        for part in parts:
            result = block_loss(self.model, self.embedding, head, part, choose_blocks(part, 0, config), config)
            torch.autograd.backward(result.loss)
            sums.values.add_(result.values.detach())
        gradients = [parameter.grad.flatten() for parameter in self.model.parameters() if parameter.grad is not None]
        self.model.zero_grad()
        return float(sums.loss / sums.weight), torch.cat(gradients)


def time_ms(action: Callable[[], object], num_steps: int) -> float:
    """Return the median milliseconds between the events around an action, launched without waiting in between."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        action()
        event.record()
    torch.cuda.synchronize()
    pairs = itertools.pairwise(events)
    return statistics.median(float(start.elapsed_time(end)) for start, end in pairs)


def gemm_rate(config: Config, num_rows: int) -> float:
    """Measure the FLOP/s of the largest product of a layer, [Q, H] x [H, I] in bfloat16 on random data, for a second."""
    hidden, wide = config.shape.hidden_size, config.draft.intermediate_size
    rows, weight = (torch.randn(n, hidden, dtype=torch.bfloat16, device=DEVICE) for n in (num_rows, wide))
    num_calls = max(3, int(700e12 / (2 * num_rows * hidden * wide)))
    time_ms(lambda: rows @ weight.T, 3)
    return 2.0 * num_rows * hidden * wide / (time_ms(lambda: rows @ weight.T, num_calls) * 1e-3)


def count_synchronisations(action: Callable[[], object]) -> int:
    """Count the times that the host waits for the GPU in `action`, by torch's debug mode."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        action()
        torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(warning.message) for warning in caught)


def describe_difference(found: tuple[float, torch.Tensor], reference: tuple[float, torch.Tensor]) -> str:
    """Describe how far loss and gradients, the latter in norm, are from a reference."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float32)
    gradient = float(norm(found[1] - reference[1]) / norm(reference[1]))
    return f"loss {abs(found[0] / reference[0] - 1):.1e}, gradient {gradient:.1e} (relative)"


def packed_against_single(step: Step, num_tokens: int) -> str:
    """Compare a batch of four documents with each alone."""
    few = msgspec.structs.replace(step.config.train, anchors_per_document=step.config.num_anchors // 8)
    config = msgspec.structs.replace(step.config, train=few)  # so that no document takes another's anchors
    batch = make_batch(config, [int(part * num_tokens) for part in MIXED_LENGTHS])
    single = [alone(batch, document) for document in range(len(MIXED_LENGTHS))]
    return describe_difference(step.train_on(step.head, [batch], config), step.train_on(step.head, single, config))


def alone(batch: PackedBatch, document: int) -> PackedBatch:
    """Return one document of a batch as a batch."""
    rows = slice(int(batch.cu_seqlens[document]), int(batch.cu_seqlens[document + 1]))
    return PackedBatch(
        hidden_states=batch.hidden_states[rows],
        position_ids=batch.position_ids[rows],
        input_ids=batch.input_ids[rows],
        loss_mask=batch.loss_mask[rows],
        cu_seqlens=np.array([0, rows.stop - rows.start]),
        sample_ids=batch.sample_ids[document : document + 1],
    )


def fetching(step: Step, batch: PackedBatch, accumulation: int) -> Callable[[], None]:
    """Return a step during which the next batch comes out of a slot: a copy and a checksum on a stream of their own."""
    layout = SlotLayout.of(step.config)
    slot = torch.frombuffer(memoryview(attach(create("bench", layout.ring_bytes(1)))), dtype=torch.uint8)
    page_lock(slot)
    hidden = slot[: batch.hidden_states.nbytes].view(torch.bfloat16).view(batch.hidden_states.shape)
    hidden.copy_(batch.hidden_states)
    buffers, copies = [batch.hidden_states.clone() for _ in range(2)], CopyStream(DEVICE)
    free, copied = [mark_computation(DEVICE)] * 2, [copies.mark()] * 2
    turns = itertools.cycle([0, 1])

    def run() -> None:
        this = next(turns)
        other = 1 - this
        for _ in range(accumulation):
            with copies.after(free[other]):
                buffers[other].copy_(hidden, non_blocking=True)
                checksum(buffers[other])
        copied[other] = copies.mark()
        copied[this].hold(torch.cuda.current_stream())
        step.whole(replace(batch, hidden_states=buffers[this]), accumulation)
        free[this] = mark_computation(DEVICE)

    return run


def measure(config: Config, num_documents: int, accumulation: int, num_steps: int) -> Rows:
    """Yield the rows of the table, as they are measured."""
    num_tokens = config.plan.max_tokens_per_batch
    step, batch = Step(config), make_batch(config, [num_tokens // num_documents] * num_documents)
    resident_gib, forward_backward = torch.cuda.memory_allocated() / GIB, partial(step.forward_backward, batch)
    began = time.perf_counter()
    forward_backward()
    torch.cuda.synchronize()
    yield "first forward + backward, compiling", f"{time.perf_counter() - began:.1f} s"
    time_ms(forward_backward, 3)
    torch.cuda.reset_peak_memory_stats()
    alone_ms = time_ms(forward_backward, num_steps)
    yield "forward + backward", f"{alone_ms:.1f} ms"
    peak_gib = torch.cuda.max_memory_allocated() / GIB
    yield "peak memory of it (weights, embedding, head, one batch)", f"{peak_gib:.2f} GiB ({resident_gib:.2f} before)"
    yield "four packed documents against one by one", packed_against_single(step, num_tokens)
    if isinstance(step.head, Fp8Head):
        rounded, exact = (step.train_on(head, [batch], config) for head in (step.head, step.head.weight))
        yield "head in FP8 against the exact one", describe_difference(rounded, exact)
    yield from measure_whole(step, batch, accumulation, num_steps, alone_ms)


def measure_whole(step: Step, batch: PackedBatch, accumulation: int, num_steps: int, alone_ms: float) -> Rows:
    """Yield figures of steps with the optimizer, beside the forward and backward pass that takes `alone_ms`."""
    config = step.config
    num_rows = config.num_anchors * config.draft.block_size
    flops = batch_flops(config, choose_blocks(batch, 0, config), batch.cu_seqlens)
    step.optimizer = MasterAdamW(step.model, config.train, 1000, config.draft.block_size)
    whole = partial(step.whole, batch, accumulation)
    whole()
    yield "host synchronisations in a whole step", str(count_synchronisations(whole))
    time_ms(whole, 3)
    before, whole_ms, after = gemm_rate(config, num_rows), time_ms(whole, num_steps), gemm_rate(config, num_rows)
    rate, num_anchors = (before + after) / 2, accumulation * config.num_anchors
    yield f"whole step, {accumulation} x 1 batch", f"{whole_ms:.1f} ms (optimizer {whole_ms - accumulation * alone_ms:.1f})"
    yield "arithmetic of a batch", f"{flops / 1e12:.1f} TFLOP"
    rates = f"{rate / 1e12:.0f} TFLOP/s ({before / 1e12:.0f} before, {after / 1e12:.0f} after)"
    yield "rate of a matrix product of these shapes", rates
    yield "utilisation, forward + backward", f"{flops / alone_ms / rate * 1e5:.1f} %"
    yield "utilisation, whole step", f"{accumulation * flops / whole_ms / rate * 1e5:.1f} %"
    fetched = fetching(step, batch, accumulation)
    time_ms(fetched, 3)
    pairs = [(time_ms(fetched, num_steps), time_ms(whole, num_steps)) for _ in range(2)]
    yield "step fetching from a slot over step on resident data", f"{statistics.mean(a / b for a, b in pairs):.3f}"
    num_tokens = accumulation * len(batch.input_ids)
    yield "anchors trained on", f"{num_anchors / whole_ms * 1e3:.0f} /s, {num_tokens / whole_ms * 1e3:.0f} tokens/s"


def main(arguments: list[str]) -> int:
    parser = make_parser("drafter", __doc__, SHAPES, "qwen3_6_27b")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--anchors", type=int, default=512)
    parser.add_argument("--documents", type=int, default=1)
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("bench drafter: needed a CUDA GPU, found none")
        return 2
    settings = [
        f"plan.max_samples_per_batch={options.documents}",
        f"train.anchors_per_document={options.anchors // options.documents}",
        f"train.anchors_per_batch={options.anchors}",
        *options.overrides,
    ]
    config = random_run(options.shape, options.tokens, settings)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {' '.join(arguments)}")
    print_rows(measure(config, options.documents, options.accumulation, options.steps))
    return 0
