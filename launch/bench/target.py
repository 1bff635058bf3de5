"""The target's half of a run on one device: forward, pack, copy and publish, beside the bare forward and plain transformers.

    python -m launch.bench target --shape qwen3_8b [--rows 8] [--length 2048] [--steps 5] [--repetitions 3] [--plain]
        [--set KEY=VALUE ...]

Random weights. A real exchange answers, in a process of its own; the slots are released as soon as they are
granted. Rates are medians over interleaved repetitions in this process: the time from the end of one forward to the
end of the next, on the device. `--plain` first measures the whole model as transformers runs it, with the same weights on
the same rows, and frees it. The shape `tiny` runs on a CPU.

B rows, S padded length.
"""

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from common.actor.lifecycle import Actor
from common.actor.messages import Lease, Work
from common.config import Config
from common.data.dataset import Dataset
from common.device.stopwatch import Stopwatch
from common.metrics import read_metrics
from common.ring.layout import SlotLayout
from common.ring.ring import RingWriter
from launch.bench.drafter import gemm_rate
from launch.bench.harness.drain import Drain
from launch.bench.harness.stage import Stage
from launch.bench.shapes import SHAPES, random_run
from launch.decoding.full_target import load_plain_target
from services.target.flops import ForwardFlops
from services.target.health import Health
from services.target.model import TargetModel
from services.target.publisher import Publisher
from services.target.rows import TargetRows, read_rows
from services.target.warmup import WarmUp

GIB = 2**30
Step = Callable[[Callable[[], None]], object]  # calls its argument when it is about to launch the forward


class Timed(NamedTuple):
    """Several batches, launched one after the other without waiting for the device."""

    period_s: list[float]  # from the end of one batch to the end of the next, on the device
    gap_s: list[float]  # of it, the device had nothing to do
    host_s: list[float]  # in the calls of one batch, on the launching thread
    first_host_s: float  # the same for the first batch, when nothing held it up


class Half:
    """What `services.target` does with a batch, one call at a time."""

    def __init__(self, stage: Stage, num_rows: int) -> None:
        config = stage.config
        record = next(spec.record for spec in stage.topology.actors if spec.role == "target")
        args = argparse.Namespace(run_dir=stage.run_dir, index=0, record=record, board_fd=stage.fds.board)
        self.actor = Actor("target", args)
        self.device = torch.device(config.targets.devices[0])
        self._dataset = Dataset.open(Path(config.data.path))
        self._ids = itertools.cycle(range(len(self._dataset.lengths)))
        self._num_rows = num_rows
        began = time.perf_counter()
        self.model = TargetModel.load(config, self.device)
        synchronize(self.device)
        self.load_s = time.perf_counter() - began
        if config.targets.compile:
            self.model.compile_layers()
        layout, num_slots, welcome = SlotLayout.of(config), config.ring.num_slots, self.actor.join()
        began = time.perf_counter()
        stagings = WarmUp(self.model, layout, config.plan, self.device).run(welcome.shapes, lambda: None)
        self.warm_up_s = time.perf_counter() - began
        self.flops = ForwardFlops(self.model.decoder)
        health = Health(self.actor.metrics, self.flops, self.device)
        writer = RingWriter(stage.fds.rings[0], layout, num_slots)
        self.publisher = Publisher(self.actor, writer, stagings, health, self.device, welcome.plan_hash)

    def publish(self, begin: Callable[[], None]) -> None:
        """One batch, as the service does it."""
        lease = self.actor.ask(Work(self.publisher.held()), self.publisher.idle_since)
        assert isinstance(lease, Lease)
        rows = self._read(lease.sample_ids)
        staging = self.publisher.take_staging(lease)
        input_ids = staging.upload(rows)
        begin()
        self.model.run(input_ids, staging.keep)
        self.publisher.send(lease, rows, staging, {})

    def compute(self, begin: Callable[[], None]) -> None:
        """The forward of one batch, and nothing done with it."""
        input_ids = self.next_rows().input_ids
        on_gpu = self.device.type == "cuda"
        input_ids = input_ids.pin_memory().to(self.device, non_blocking=True) if on_gpu else input_ids
        begin()
        self.model.run(input_ids, lambda tap_index, tap: None)

    def next_rows(self) -> TargetRows:
        """A batch of the data set."""
        return self._read([next(self._ids) for _ in range(self._num_rows)])

    def settle(self) -> None:
        """Wait until all that was launched is done and announced."""
        synchronize(self.device)
        while self.publisher.held():
            time.sleep(0.001)

    def close(self) -> None:
        """Leave the run."""
        self.actor.stopping = True
        self.actor.close()

    def _read(self, sample_ids: Sequence[int]) -> TargetRows:
        return read_rows(self._dataset, sample_ids, self.actor.config.plan.bucket_lengths)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_steps(step: Step, num_steps: int, device: torch.device) -> Timed:
    """Launch one batch more than asked for: the first finds the device idle and is not timed on it."""
    synchronize(device)
    host_s, watch = [], Stopwatch(device)
    for number in range(num_steps + 1):
        began = time.perf_counter()
        step(lambda number=number: watch.lap(f"gap {number}"))  # type: ignore[misc]
        host_s.append(time.perf_counter() - began)
        watch.lap(f"work {number}")
    synchronize(device)
    laps_s = watch.laps_s()
    gap_s = [laps_s[f"gap {number}"] for number in range(1, num_steps + 1)]
    period_s = [gap + laps_s[f"work {number}"] for number, gap in enumerate(gap_s, 1)]
    return Timed(period_s, gap_s, host_s[1:], host_s[0])


def measure(stage: Stage, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The rows of the table, as they are measured."""
    torch.set_num_threads(stage.config.targets.num_threads)
    plain_rates: dict[str, float] = {}
    if options.plain:
        plain_rates = yield from measure_plain(stage.config, options)
        gc.collect()  # its model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    half = Half(stage, options.rows)
    device, num_tokens = half.device, options.rows * options.length
    yield "load", f"{half.load_s:.1f} s"
    yield "warm-up, with whatever is tuned or compiled in it", f"{half.warm_up_s:.1f} s"
    reset_peak(device)
    measure_steps(half.publish, 2, device)
    half.settle()
    pairs = []
    for _ in range(options.repetitions):
        published = measure_steps(half.publish, options.steps, device)
        half.settle()
        pairs.append((published, measure_steps(half.compute, options.steps, device)))
    published, bare = (merge(side) for side in zip(*pairs, strict=True))
    rate, bare_rate = (num_tokens / statistics.median(timed.period_s) for timed in (published, bare))
    ratios = [statistics.median(b.period_s) / statistics.median(a.period_s) for a, b in pairs]
    forward_s = statistics.median(bare.period_s)
    host_s = published.first_host_s
    yield "tokens/s, published", f"{rate:.0f}"
    yield "tokens/s, the same forward alone", f"{bare_rate:.0f}"
    yield "published over alone (wanted 0.98)", f"{rate / bare_rate:.4f} ({', '.join(f'{ratio:.4f}' for ratio in ratios)})"
    yield "device waits for the launching thread, of a forward (1 %)", f"{statistics.median(published.gap_s) / forward_s:.2%}"
    yield "launching a batch on an idle device", f"{host_s * 1e3:.1f} ms, {host_s / forward_s:.1%} of a forward"
    ahead_s = max(0.0, statistics.median(published.host_s) - host_s)
    yield "launching thread held back while the device works", f"{ahead_s * 1e3:.1f} ms a batch (as far ahead as it may be)"
    yield "of a batch: pack, copy to the slot, announce", f"{', '.join(way_to_the_slot_ms(stage))} ms"
    if device.type == "cuda":
        yield "peak memory", f"{torch.cuda.max_memory_allocated() / GIB:.2f} GiB"
        yield from utilisation(half, options, forward_s)
    half.close()
    for what, plain_rate in plain_rates.items():
        yield f"published over {what}", f"{rate / plain_rate:.3f}"


def way_to_the_slot_ms(stage: Stage) -> list[str]:
    """Medians over the batches that were published, as the target's own metrics have them."""
    lines = list(read_metrics(stage.run_dir, "target-0"))
    return [f"{statistics.median(line[name] for line in lines) * 1e3:.2f}" for name in ("pack_s", "copy_s", "publish_s")]


def merge(side: Sequence[Timed]) -> Timed:
    """All repetitions as one."""
    return Timed(
        period_s=[period_s for timed in side for period_s in timed.period_s],
        gap_s=[gap_s for timed in side for gap_s in timed.gap_s],
        host_s=[host_s for timed in side for host_s in timed.host_s],
        first_host_s=statistics.median(timed.first_host_s for timed in side),
    )


def utilisation(half: Half, options: argparse.Namespace, forward_s: float) -> Iterator[tuple[str, str]]:
    """How much of the device's rate of matrix products the forward reaches."""
    flops = half.flops.of(np.full(options.rows, options.length))
    rate = gemm_rate(half.actor.config, options.rows * options.length)
    yield "arithmetic of a forward", f"{flops / 1e12:.1f} TFLOP"
    yield "rate of a matrix product of this many rows", f"{rate / 1e12:.0f} TFLOP/s"
    yield "utilisation of the forward", f"{flops / forward_s / rate:.1%}"


def measure_plain(config: Config, options: argparse.Namespace) -> Generator[tuple[str, str], None, dict[str, float]]:
    """The whole model with all hidden states: with the logits of every token, as it does by default, and of the last."""
    device, num_tokens = torch.device(config.targets.devices[0]), options.rows * options.length
    rows = read_rows(Dataset.open(Path(config.data.path)), range(options.rows), config.plan.bucket_lengths)
    model, input_ids = load_plain_target(config, device), rows.input_ids.to(device)
    rates = {}
    for what, keep in (("plain transformers", 0), ("plain transformers without logits", 1)):

        @torch.inference_mode()
        def step(begin: Callable[[], None], keep: int = keep) -> None:
            begin()
            model(input_ids=input_ids, output_hidden_states=True, use_cache=False, logits_to_keep=keep)

        measure_steps(step, 1, device)
        reset_peak(device)
        timed = [measure_steps(step, options.steps, device) for _ in range(options.repetitions)]
        rates[what] = num_tokens / statistics.median(merge(timed).period_s)
        yield f"tokens/s, {what}", f"{rates[what]:.0f}"
        if device.type == "cuda":
            yield "peak memory of it", f"{torch.cuda.max_memory_allocated() / GIB:.2f} GiB"
    return rates


def reset_peak(device: torch.device) -> None:
    """Count peak memory from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m launch.bench target", description=__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, "tiny"], default="qwen3_8b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="batches of a repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="also the whole model in transformers")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    device = "cpu" if options.shape == "tiny" else "cuda:0"
    if device != "cpu" and not torch.cuda.is_available():
        print("bench target: needed a CUDA GPU, found none")
        return 2
    settings = [
        f"plan.max_tokens_per_batch={options.rows * options.length}",
        f"plan.max_samples_per_batch={options.rows}",
        "plan.epochs=1000",
        f'targets.devices=["{device}"]',
        'drafters.devices=["cpu"]',
        *options.overrides,
    ]
    name = torch.cuda.get_device_name() if device != "cpu" else "CPU"
    print(f"{name}, torch {torch.__version__}, {' '.join(arguments)}", flush=True)
    with Stage(random_run(options.shape, options.length, settings), "target") as stage:
        stage.await_ready(stage.start("exchange"))
        drain = Drain(stage.run_dir)
        for what, value in measure(stage, options):
            print(f"{what:58} {value}", flush=True)
        drain.close()
    return 0
