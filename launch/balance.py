"""Measure both sides of a run once and print the train.anchors_per_batch at which they keep pace.

    python -m launch.balance CONFIG [--set KEY=VALUE ...]

The first target device measures tokens per second over the batches of the plan, then the first drafter device measures
the cost of a batch and of an anchor. All targets are taken to be alike, and all drafters. One device may be both.
Exit code 0: done; 2: bad configuration or input.
"""

import argparse
import gc
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from common.actor.messages import BatchShape
from common.config import Config, load
from common.device.memory import take_device, take_devices
from common.ring.layout import SlotLayout
from launch.arguments import make_parser, run_command
from launch.data.synthetic import write_synthetic
from launch.operate.run_config import resolve
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.loss import loss_head
from services.drafter.model.model import DraftModel
from services.drafter.training.budget import BatchCost, balanced_anchors, mean_anchors, measure_cost
from services.drafter.training.optimizer import MasterAdamW
from services.drafter.training.training_state import TrainingState
from services.exchange.plan import Plan
from services.exchange.samples import read_run_data
from services.target.model import TargetModel
from services.target.rows import make_rows
from services.target.staging import Staging
from services.target.warmup import WarmUp


def measure_target(config: Config, plan: Plan) -> float:
    """Return the tokens per second of one target, warmed up."""
    torch.set_num_threads(config.targets.num_threads)
    model = TargetModel.load(config, *take_devices(config.targets.devices[0], "targets.devices"))
    if config.targets.compile:
        model.compile_layers()
    stagings = WarmUp(model, SlotLayout.of(config), config.plan).run(plan.shapes, lambda: None)
    return measure_speed(model, stagings[0], plan.shapes) * len(model.stages)  # which work on as many batches at a time


def measure_speed(model: TargetModel, staging: Staging, shapes: list[BatchShape]) -> float:
    """Return the tokens per second over an epoch's batches of these shapes, forward and packing.

    The tokens are random: a GPU computes faster with constant values, so a measurement would promise too much.
    """
    num_tokens, taken_s, random = 0, 0.0, np.random.default_rng(0)
    for shape in (shape for shape in shapes if shape.num_batches):
        tokens = random.integers(0, model.vocab_size, (shape.num_rows, shape.length), np.int32)
        rows = make_rows(list(tokens), list(tokens), range(shape.num_rows), shape.length)
        model.synchronize()
        began = time.perf_counter()
        model.run(staging.upload(rows), staging.keep, staging.enter)
        model.synchronize()
        num_tokens += shape.num_batches * shape.num_rows * shape.length
        taken_s += shape.num_batches * (time.perf_counter() - began)
    return num_tokens / taken_s


def measure_drafter(config: Config, plan: Plan) -> BatchCost:
    """Return the cost of a batch on one drafter."""
    torch.set_num_threads(config.drafters.num_threads)
    device = take_device(config.drafters.devices[0], "drafters.devices")
    embedding, head = load_embedding_and_head(config, device)
    model = DraftModel(config, device)
    optimizer = MasterAdamW(model, config.train, plan.num_steps, config.draft.block_size)
    return measure_cost(TrainingState(model, (embedding, loss_head(head, config.train.head)), optimizer), config)


def balance(config: Config) -> list[str]:
    """Measure both sides; return the lines to print.

    Raises:
        HeadraceError: model or data are missing or damaged, or a full batch does not fit into the memory of a device.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-balance-") as folder:
        config = resolve(config, Path(folder))
        if config.data.synthetic is not None:
            write_synthetic(config, Path(folder) / "data")
        plan, _ = read_run_data(config.data).plan(config)
    speed = measure_target(config, plan)
    gc.collect()
    torch.cuda.empty_cache()
    cost = measure_drafter(config, plan)
    batches_per_s = config.num_targets * speed / plan.tokens_per_batch
    anchors = balanced_anchors([cost] * config.num_drafters, batches_per_s, plan.shapes, config)
    mean = mean_anchors(anchors, plan.shapes, config)
    taken = config.num_drafters * plan.tokens_per_batch / (cost.seconds + cost.seconds_per_anchor * mean)
    return [
        f"a target makes      {speed:,.0f} tokens/s, {config.num_targets} of them {config.num_targets * speed:,.0f}",
        f"a drafter takes     {cost.seconds:.4f} s a batch and {cost.seconds_per_anchor:.3g} s an anchor",
        f"{config.num_drafters} drafters train on {taken:,.0f} tokens/s, {mean:,.0f} anchors a batch on average",
        f"anchors_per_batch = {anchors}",
    ]


def _balance(options: argparse.Namespace) -> None:
    print("\n".join(balance(load(options.config, options.overrides))))


def main(arguments: list[str] | None = None) -> int:
    """Read the command line, measure and print."""
    parser = make_parser("balance", __doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a TOML file")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    return run_command(_balance, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
