"""Two drafters against one, from resident slots: speed, the same training, and the cost of one's death.

    python -m launch.bench scaling --shape qwen3_8b [--devices cuda:0 cuda:1] [--steps N] [--samples 1000] [--kill]
        [--set KEY=VALUE ...]

Real drafter processes and their group (nccl on GPUs, gloo on CPUs), the same batches in the same steps: four a step, so two
for each of two. Without `--steps` each run goes to its end and the weights are compared; with it, each is
ended at once behind that step. `--kill` adds a run in which the second drafter dies in the middle of a collective.
"""

import argparse
import itertools
import statistics
import tempfile
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import load_file

from common.actor.faults import Fault
from launch.bench.harness.peers import train
from launch.bench.harness.stage import Stage
from launch.bench.harness.table import Rows, make_parser, print_rows
from launch.bench.harness.trial import StepLine, longest_pause_s, read_steps
from launch.bench.harness.workload import SHAPES, TokenCounts, Workload

BATCHES_PER_STEP = 4
FIRST_COUNTED = 5  # kernels are compiled in the steps before
FATAL_STEP = 7
DIES = Fault("drafter.mid_collective", 3 + FATAL_STEP)  # three collectives go before the first step


class Trained(NamedTuple):
    """The result of one run."""

    steps: list[StepLine]
    tokens_per_s: float
    weights: dict[str, torch.Tensor]  # {} if it was ended early


def measure(folder: Path, options: argparse.Namespace) -> Rows:
    """Yield the rows of the table, as they are measured."""
    one = run(folder / "one", options, options.devices[:1])
    yield "tokens/s, one drafter", f"{one.tokens_per_s:.0f}"
    two = run(folder / "two", options, options.devices)
    yield f"tokens/s, {len(options.devices)} drafters", f"{two.tokens_per_s:.0f}"
    yield "scaling (wanted 1.9), median over equal steps", f"{statistics.median(speedups(one, two)):.3f}"
    reduce_s = statistics.median(line.reduce_s for line in two.steps[FIRST_COUNTED:])
    yield "the sum over the drafters, in a step", f"{reduce_s * 1e3:.1f} ms"
    first, second = one.steps[0], two.steps[0]
    yield "first loss, relative difference", f"{abs(first.loss / second.loss - 1):.1e}"
    yield "first gradient norm, relative difference", f"{abs(first.grad_norm / second.grad_norm - 1):.1e}"
    yield from compare("weights of one and two", one, two)
    if options.kill:
        disturbed = run(folder / "kill", options, options.devices, {"drafter-1": [DIES]})
        numbers = [line.step for line in disturbed.steps]
        near = disturbed.steps[FATAL_STEP - 3 :]  # a step's line is written in the next step
        yield (
            "one killed in a collective: longest time without a step",
            f"{longest_pause_s([line.time_s for line in near]):.1f} s",
        )
        yield "steps that the other lost or made again", f"{len(numbers) - len(set(numbers))}"
        yield "every step once, in order", "yes" if numbers == list(range(1, len(numbers) + 1)) else "NO"
        yield from compare("weights, killed against undisturbed", disturbed, two)


def speedups(one: Trained, two: Trained) -> list[float]:
    """Return how much faster each step was; the same step has the same batches."""
    periods = [[after.time_s - before.time_s for before, after in itertools.pairwise(run.steps)] for run in (one, two)]
    return [alone_s / shared_s for alone_s, shared_s in list(zip(*periods, strict=False))[FIRST_COUNTED:]]


def run(folder: Path, options: argparse.Namespace, devices: list[str], faults: dict[str, list[Fault]] | None = None) -> Trained:
    """Train on these devices."""
    with Stage(make_workload(folder, options, devices).config, "scaling") as stage:
        (stage.run_dir / "faults.json").write_bytes(msgspec.json.encode(faults or {}))
        train(stage, lambda: bool(options.steps) and len(read_steps(stage.run_dir)) > options.steps)
        steps, counts = read_steps(stage.run_dir), TokenCounts(stage.config)
        needed = FATAL_STEP if faults else FIRST_COUNTED
        if len(steps) <= needed:
            raise RuntimeError(f"--samples, --steps: needed a run of more than {needed} steps, found {len(steps)}")
        export = stage.run_dir / "export" / "model.safetensors"
        weights = load_file(export) if export.exists() else {}
    first, last = steps[FIRST_COUNTED - 1], steps[-1]
    return Trained(steps, counts.of_steps(first.step + 1, last.step) / (last.time_s - first.time_s), weights)


def make_workload(folder: Path, options: argparse.Namespace, devices: list[str]) -> Workload:
    """Make a run of one epoch; the target that is named in it never runs."""
    settings = [f"plan.batches_per_step={BATCHES_PER_STEP}", "plan.epochs=1", "targets.compile=false", *options.overrides]
    return Workload.make(options.shape, folder, (["cpu"], devices), options.samples, settings)


def compare(name: str, some: Trained, other: Trained) -> Rows:
    """Yield the relative difference of the final weights."""
    if some.weights and other.weights:
        squares = [(some.weights[key].float() - value.float()).square().sum() for key, value in other.weights.items()]
        sizes = [value.float().square().sum() for value in other.weights.values()]
        yield f"{name}, relative difference", f"{float((sum(squares) / sum(sizes)) ** 0.5):.1e}"


def main(arguments: list[str]) -> int:
    parser = make_parser("scaling", __doc__, SHAPES, "qwen3_8b")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], metavar="DEVICE")
    parser.add_argument("--steps", type=int, default=0, help="end each run at once behind this step")
    parser.add_argument("--samples", type=int, default=1000, help="rows of the data set, which is trained on once")
    parser.add_argument("--kill", action="store_true", help="also a run in which the second drafter dies in a collective")
    options = parser.parse_args(arguments)
    print(" ".join(arguments), flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-scaling-") as folder:
        print_rows(measure(Path(folder), options))
    return 0
