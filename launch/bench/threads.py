"""The design that this project replaces: target and drafter as two threads of one process, a queue of pinned tensors between.

    python -m launch.bench threads --shape qwen3_8b [--devices cuda:0 cuda:1] [--seconds 60] [--samples 4096]
        [--set KEY=VALUE ...]

The same models, batches, anchors and optimizer as `launch.bench river`, correctly synchronised, and as many
tensors in the queue as a ring has slots. There are no checksums, and nothing survives the death of the process.
"""

import itertools
import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from common.config import Config
from common.data.dataset import Dataset
from common.device.copy_stream import Mark, mark_computation
from common.device.stopwatch import Stopwatch
from common.device.upload import upload
from common.ring.layout import SlotLayout
from common.ring.ring import Rows
from launch.bench.harness import table
from launch.bench.harness.gpu_monitor import GpuMonitor
from launch.bench.harness.workload import SHAPES, Workload
from services.drafter.model.anchors import choose_blocks
from services.drafter.model.batch import PackedBatch
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_loss
from services.drafter.training.optimizer import MasterAdamW
from services.exchange.samples import read_run_data
from services.target.model import TargetModel
from services.target.rows import read_rows
from services.target.warmup import WarmUp

SETTLED_BATCHES = 6  # kernels are compiled before
WAIT_S = 0.1
T = TypeVar("T")
Item = tuple[torch.Tensor, Rows]  # hidden states [T, K, H] in pinned memory


class Done(NamedTuple):
    """A batch that a device has finished."""

    time_s: float
    num_tokens: int
    busy_s: float  # the device's work on it


class Flight(NamedTuple):
    """A batch that a device works on; each thread has two, so that the device never waits for the host."""

    item: Item
    watch: Stopwatch
    end: Mark


class ClosedError(Exception):
    """The measurement is over."""


class Pipeline:
    """Both threads and the queue between them, until `close`."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._plan, _ = read_run_data(config.data).plan(config)
        self._dataset = Dataset.open(Path(config.data.path))
        self._queue: queue.Queue[Item] = queue.Queue(config.ring.num_slots)
        self._closing = threading.Event()
        self.done: dict[str, list[Done]] = {"target": [], "drafter": []}
        self._threads = ThreadPoolExecutor(2, "pipeline")
        target, drafter = torch.device(config.targets.devices[0]), torch.device(config.drafters.devices[0])
        self._futures = [
            self._threads.submit(self._drive, "target", target, self._produce(target)),
            self._threads.submit(self._drive, "drafter", drafter, self._consume(drafter)),
        ]

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown()

    def watch(self) -> None:
        """Sleep a little; raise the exception that ended a thread."""
        time.sleep(0.05)
        for future in self._futures:
            if future.done():
                future.result()

    def _drive(self, role: str, device: torch.device, flights: Iterator[Flight]) -> None:
        """Finish each batch after the next one was launched."""
        if device.type == "cuda":
            torch.cuda.set_device(device)  # of this thread
        for flight, _ in itertools.pairwise(flights):
            flight.end.wait()
            self.done[role].append(Done(time.monotonic(), len(flight.item[1].input_ids), flight.watch.laps_s()["busy_s"]))
            if role == "target":
                self._retry(partial(self._queue.put, flight.item, timeout=WAIT_S))

    def _produce(self, device: torch.device) -> Iterator[Flight]:
        config, plan = self._config, self._plan
        model = TargetModel.load(config, device)
        WarmUp(model, SlotLayout.of(config), config.plan).run(plan.shapes, lambda: None)
        for batch in range(plan.num_batches):
            rows = read_rows(self._dataset, plan.sample_ids(batch), config.plan.bucket_lengths)
            watch = Stopwatch(device)
            taps = model.forward(upload(rows.input_ids.numpy(), device))
            token_index = upload(rows.token_index, device)
            packed = torch.stack([tap.flatten(0, 1)[token_index] for tap in taps], dim=1)
            hidden = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=device.type == "cuda")
            hidden.copy_(packed, non_blocking=True)
            watch.lap("busy_s")
            yield Flight((hidden, rows.packed), watch, mark_computation(device))

    def _consume(self, device: torch.device) -> Iterator[Flight]:
        config = self._config
        frozen, model = load_embedding_and_head(config, device), DraftModel(config, device)
        optimizer = MasterAdamW(model, config.train, self._plan.num_steps, config.draft.block_size)
        for batch in range(self._plan.num_batches):
            item = self._retry(partial(self._queue.get, timeout=WAIT_S))
            watch = Stopwatch(device)
            packed = to_batch(*item, device)
            sums = block_loss(model, *frozen, packed, choose_blocks(packed, 0, config), config)
            optimizer.gradients.accumulate(sums)
            step, index = divmod(batch, config.accumulation)
            if index == config.accumulation - 1:
                optimizer.gradients.reduce(lambda bucket: None)
                optimizer.step(step)
            watch.lap("busy_s")
            yield Flight(item, watch, mark_computation(device))

    def _retry(self, action: Callable[[], T]) -> T:
        while not self._closing.is_set():
            with suppress(queue.Full, queue.Empty):
                return action()
        raise ClosedError


def to_batch(hidden: torch.Tensor, rows: Rows, device: torch.device) -> PackedBatch:
    """Move an item of the queue to the drafter's device."""
    return PackedBatch(
        hidden_states=hidden.to(device, non_blocking=True),
        position_ids=upload(rows.position_ids.astype(np.int64), device),
        input_ids=rows.input_ids.astype(np.int64),
        loss_mask=rows.loss_mask.astype(np.bool_),
        cu_seqlens=rows.cu_seqlens.astype(np.int64),
        sample_ids=rows.sample_ids.astype(np.int64),
    )


def measure(pipeline: Pipeline, seconds: float, gpus: GpuMonitor) -> table.Rows:
    """Yield the rows of the table, once the drafter has settled."""
    while len(pipeline.done["drafter"]) < SETTLED_BATCHES:
        pipeline.watch()
    began, began_s = time.monotonic(), time.time()
    while time.monotonic() < began + seconds:
        pipeline.watch()
    ended, ended_s = time.monotonic(), time.time()
    for role, done in pipeline.done.items():
        first, *inside = [batch for batch in done[:] if began <= batch.time_s <= ended]
        duration_s = inside[-1].time_s - first.time_s
        rate, busy = sum(batch.num_tokens for batch in inside) / duration_s, sum(batch.busy_s for batch in inside) / duration_s
        yield f"{role}: tokens/s, device at work on them", f"{rate:.0f}, {busy:.1%} of the time"
    for index, samples in gpus.between(began_s, ended_s).items():
        yield f"GPU {index} busy (nvidia-smi)", f"{statistics.mean(sample.busy for sample in samples):.1%}"


def main(arguments: list[str]) -> int:
    parser = table.make_parser("threads", __doc__, SHAPES, "qwen3_8b")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], metavar="DEVICE")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--samples", type=int, default=4096, help="rows of the data set")
    options = parser.parse_args(arguments)
    target, drafter = options.devices
    print(" ".join(arguments), flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-threads-") as name, GpuMonitor() as gpus:
        workload = Workload.make(options.shape, Path(name), ([target], [drafter]), options.samples, options.overrides)
        with closing(Pipeline(workload.config)) as pipeline:
            table.print_rows(measure(pipeline, options.seconds, gpus))
    return 0
