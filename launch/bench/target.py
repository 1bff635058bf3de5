"""The target's half of a run: forward, pack, copy and publish, beside the bare forward and plain transformers.

    python -m launch.bench target --shape qwen3_8b [--rows 8] [--length 2048] [--steps 5] [--repetitions 3] [--plain]
        [--devices cuda:0+cuda:1] [--set KEY=VALUE ...]

Random weights. The target's own service runs in this process, batch by batch; a real exchange answers, in a process of its
own; the slots are released as soon as they are granted. Rates are medians over interleaved repetitions: the time from the end
of one forward to the end of the next, on the last device. `--devices` splits the target; its forward on the first device
alone is then measured before, and its taps are compared. `--plain` first measures the whole model as transformers runs it,
with the same weights on the same rows, and frees it. The shape `tiny` runs on a CPU.
"""

import argparse
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common.actor.lifecycle import Actor
from common.config import Config
from common.data.dataset import Dataset
from common.device.memory import GIB
from common.device.stopwatch import Stopwatch
from common.device.upload import upload
from common.metrics import read_metrics
from launch.bench.drafter import gemm_rate
from launch.bench.harness.peers import Drain
from launch.bench.harness.stage import Stage
from launch.bench.harness.table import Rows, make_parser, print_rows
from launch.bench.shapes import SHAPES, random_run
from launch.decoding.full_target import load_plain_target
from launch.operate.child import SPLIT_ENVIRONMENT
from services.target.flops import ForwardFlops
from services.target.model import TargetModel
from services.target.rows import TargetRows, read_rows
from services.target.service import TargetService

_DEVICE_WORK = ("upload_s", "forward_s", "pack_s")


class Half:
    """The service of a target, called batch by batch, and the same forward alone."""

    def __init__(self, stage: Stage, num_rows: int) -> None:
        self.config = stage.config
        record = next(spec.record for spec in stage.topology.actors if spec.role == "target")
        fds = {"board_fd": stage.fds.board, "ring_fd": stage.fds.rings[0]}
        self.actor = Actor("target", argparse.Namespace(run_dir=stage.run_dir, index=0, record=record, **fds))
        began = time.perf_counter()
        self.service = TargetService(self.actor)
        self.model = self.service.model
        self.model.synchronize()
        self.load_s = time.perf_counter() - began
        began = time.perf_counter()
        self._publisher = self.service.warm_up()
        self.warm_up_s = time.perf_counter() - began
        self._dataset = Dataset.open(Path(self.config.data.path))
        self._ids = itertools.cycle(range(len(self._dataset.lengths)))
        self._num_rows = num_rows

    def publish(self, num_batches: int) -> tuple[list[dict[str, Any]], list[float]]:
        """Make one batch more than `num_batches`: the first finds the device idle.

        Returns:
            The service's metrics of every batch but the first, and the seconds of every call.
        """
        self.model.synchronize()
        first, host_s = len(self._metrics()) + 1, []
        for _ in range(num_batches + 1):
            began = time.perf_counter()
            self.service.make_batch(self._publisher)
            host_s.append(time.perf_counter() - began)
        while len(lines := self._metrics()) < first + num_batches:
            self.actor.keep_waiting()
            time.sleep(0.01)
        return lines[first:], host_s

    def compute(self) -> None:
        """Launch the forward of one batch, and do nothing with it."""
        sample_ids = [next(self._ids) for _ in range(self._num_rows)]
        rows = read_rows(self._dataset, sample_ids, self.config.plan.bucket_lengths)
        launch_forward(self.model, rows)

    def close(self) -> None:
        self.actor.stopping = True
        self.actor.close()

    def _metrics(self) -> list[dict[str, Any]]:
        return list(read_metrics(self.actor.run_dir, self.actor.name))


def launch_forward(model: TargetModel, rows: TargetRows) -> None:
    model.run(upload(rows.input_ids.numpy(), model.stages[0].device), lambda tap_index, tap: None)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_periods_s(
    launch: Callable[[], None], num_batches: int, device: torch.device, stream: torch.cuda.Stream | None = None
) -> list[float]:
    """Return the device's seconds from the end of one batch to the end of the next, on `stream` or else the current one.

    One batch more than `num_batches` is launched: the first finds the device idle and is not timed.
    """
    synchronize(device)
    watch = Stopwatch(device, stream)
    for number in range(num_batches + 1):
        launch()
        watch.lap(str(number))
    synchronize(device)
    return list(watch.laps_s().values())[1:]


def measure(stage: Stage, options: argparse.Namespace) -> Rows:
    """Yield the rows of the table, as they are measured."""
    torch.set_num_threads(stage.config.targets.num_threads)
    others: dict[str, float] = {}
    if options.plain:
        others |= yield from measure_plain(stage.config, options)
        free_memory()
    one_device: list[torch.Tensor] = []
    if "+" in stage.config.targets.devices[0]:
        others["one device"], one_device = yield from measure_one_device(stage.config, options)
        free_memory()
    half = Half(stage, options.rows)
    yield "load", f"{half.load_s:.1f} s"
    yield "warm-up, with all tuning and compiling in it", f"{half.warm_up_s:.1f} s"
    for each in half.model.stages:
        reset_peak(each.device)
    half.publish(2)
    rate = yield from measure_published(half, options)
    half.close()
    for name, other_rate in others.items():
        yield f"published over {name}", f"{rate / other_rate:.3f}"
    if one_device:
        input_ids = first_rows(stage.config, options).input_ids.to(first_device(stage.config))
        taps = [tap.cpu() for tap in half.model.forward(input_ids)]
        yield "taps equal to those of one device", "yes" if all(map(torch.equal, taps, one_device)) else "NO"


def measure_published(half: Half, options: argparse.Namespace) -> Generator[tuple[str, str], None, float]:
    """Yield the speed of the service beside the bare forward, in turns; return the tokens per second of the service."""
    last, num_tokens = half.model.stages[-1], options.rows * options.length
    runs = [
        (*half.publish(options.steps), measure_periods_s(half.compute, options.steps, last.device, last.stream))
        for _ in range(options.repetitions)
    ]
    lines = [line for found, _, _ in runs for line in found]
    periods_s = [[sum(line[name] for name in ("idle_s", *_DEVICE_WORK)) for line in found] for found, _, _ in runs]
    ratios = [statistics.median(bare) / statistics.median(one) for (_, _, bare), one in zip(runs, periods_s, strict=True)]
    forward_s = statistics.median(s for _, _, bare in runs for s in bare)
    rate: float = num_tokens / statistics.median(itertools.chain(*periods_s))
    bare_rate = num_tokens / forward_s
    yield "tokens/s, published", f"{rate:.0f}"
    yield "tokens/s, the same forward alone", f"{bare_rate:.0f}"
    yield "published over alone (wanted 0.98)", f"{rate / bare_rate:.4f} ({', '.join(f'{ratio:.4f}' for ratio in ratios)})"
    idle_s = statistics.median(line["idle_s"] for line in lines)
    yield "device waits for the launching thread, of a forward (1 %)", f"{idle_s / forward_s:.2%}"
    launch_s = statistics.median(calls[0] for _, calls, _ in runs)
    yield "launching a batch on an idle device", f"{launch_s * 1e3:.1f} ms, {launch_s / forward_s:.1%} of a forward"
    ahead_s = max(0.0, statistics.median(s for _, calls, _ in runs for s in calls[1:]) - launch_s)
    yield "launching thread held back while the device works", f"{ahead_s * 1e3:.1f} ms a batch (as far ahead as it may be)"
    parts = [statistics.median(line[name] for line in lines) * 1e3 for name in ("pack_s", "copy_s", "publish_s")]
    yield "of a batch: pack, copy to the slot, announce", f"{', '.join(f'{part:.2f}' for part in parts)} ms"
    if last.device.type == "cuda":
        peaks = [torch.cuda.max_memory_allocated(each.device) / GIB for each in half.model.stages]
        yield "peak memory", f"{', '.join(f'{peak:.2f}' for peak in peaks)} GiB"
        flops = ForwardFlops(half.model.decoder).of(np.full(options.rows, options.length))
        product_rate = gemm_rate(half.config, num_tokens)
        yield "arithmetic of a forward", f"{flops / 1e12:.1f} TFLOP"
        yield "rate of a matrix product of this many rows", f"{product_rate / 1e12:.0f} TFLOP/s"
        yield "utilisation of the forward", f"{flops / forward_s / product_rate / len(peaks):.1%}"
    return rate


def measure_plain(config: Config, options: argparse.Namespace) -> Generator[tuple[str, str], None, dict[str, float]]:
    """Yield the speed of the whole model with all hidden states, with the logits of every token and of the last only."""
    device, rows = first_device(config), first_rows(config, options)
    model, input_ids = load_plain_target(config, device), rows.input_ids.to(device)
    rates = {}
    for name, num_logits in (("plain transformers", 0), ("plain transformers without logits", 1)):

        @torch.inference_mode()
        def launch(num_logits: int = num_logits) -> None:
            model(input_ids=input_ids, output_hidden_states=True, use_cache=False, logits_to_keep=num_logits)

        measure_periods_s(launch, 1, device)
        reset_peak(device)
        periods_s = [s for _ in range(options.repetitions) for s in measure_periods_s(launch, options.steps, device)]
        rates[name] = options.rows * options.length / statistics.median(periods_s)
        yield f"tokens/s, {name}", f"{rates[name]:.0f}"
        if device.type == "cuda":
            yield "peak memory of it", f"{torch.cuda.max_memory_allocated() / GIB:.2f} GiB"
    return rates


def measure_one_device(
    config: Config, options: argparse.Namespace
) -> Generator[tuple[str, str], None, tuple[float, list[torch.Tensor]]]:
    """Yield the speed of the forward on the first device alone; return tokens per second, and the taps of one batch."""
    device, rows = first_device(config), first_rows(config, options)
    model = TargetModel.load(config, device)
    if config.targets.compile:
        model.compile_layers()
    taps = [tap.cpu() for tap in model.forward(rows.input_ids.to(device))]
    launch = partial(launch_forward, model, rows)
    measure_periods_s(launch, 2, device)
    periods_s = [s for _ in range(options.repetitions) for s in measure_periods_s(launch, options.steps, device)]
    rate = options.rows * options.length / statistics.median(periods_s)
    yield "tokens/s, one device", f"{rate:.0f}"
    return rate, taps


def first_device(config: Config) -> torch.device:
    return torch.device(config.targets.devices[0].split("+")[0])


def first_rows(config: Config, options: argparse.Namespace) -> TargetRows:
    return read_rows(Dataset.open(Path(config.data.path)), range(options.rows), config.plan.bucket_lengths)


def free_memory() -> None:  # of a model that is no longer used
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def main(arguments: list[str]) -> int:
    parser = make_parser("target", __doc__, [*SHAPES, "tiny"], "qwen3_8b")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="batches of a repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--plain", action="store_true", help="also the whole model in transformers")
    parser.add_argument("--devices", help='of the target, such as "cuda:0+cuda:1" (default: cuda:0, or cpu for tiny)')
    options = parser.parse_args(arguments)
    device = options.devices or ("cpu" if options.shape == "tiny" else "cuda:0")
    if "+" in device:
        os.environ |= SPLIT_ENVIRONMENT  # CUDA reads it when it starts
    if "cuda" in device and not torch.cuda.is_available():
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
    name = torch.cuda.get_device_name() if "cuda" in device else "CPU"
    print(f"{name}, torch {torch.__version__}, {' '.join(arguments)}", flush=True)
    with Stage(random_run(options.shape, options.length, settings), "target") as stage:
        stage.await_ready(stage.start("exchange"))
        drain = Drain(stage.run_dir)
        print_rows(measure(stage, options))
        drain.close()
    return 0
