"""Two drafters against one, from resident slots: speed, the same training, and what the death of one costs.

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
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from safetensors.torch import load_file

from common.actor.faults import Fault
from launch.bench.harness.feed import train
from launch.bench.harness.observation import StepLine, read_steps
from launch.bench.harness.stage import Stage
from launch.bench.harness.workload import SHAPES, TokenCounts, Workload

BATCHES_PER_STEP = 4
FIRST_COUNTED = 5  # kernels are compiled in the steps before
FATAL_STEP = 7
DIES = Fault("drafter.mid_collective", 3 + FATAL_STEP)  # three collectives go before the first step


class Trained(NamedTuple):
    """What one run came to."""

    steps: list[StepLine]
    tokens_per_s: float
    weights: dict[str, torch.Tensor]  # {} where it was ended before its end


def measure(folder: Path, options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The rows of the table, as they are measured."""
    one = run(folder / "one", options, options.devices[:1])
    yield "tokens/s, one drafter", f"{one.tokens_per_s:.0f}"
    two = run(folder / "two", options, options.devices)
    yield f"tokens/s, {len(options.devices)} drafters", f"{two.tokens_per_s:.0f}"
    yield "scaling (wanted 1.9), median over equal steps", f"{statistics.median(speedups(one, two)):.3f}"
    reduce_s = statistics.median(line.reduce_s for line in two.steps[FIRST_COUNTED:])
    yield "the sum over the drafters, in a step", f"{reduce_s * 1e3:.1f} ms"
    yield "first loss, relative difference", f"{difference(one.steps[0].loss, two.steps[0].loss):.1e}"
    yield "first gradient norm, relative difference", f"{difference(one.steps[0].grad_norm, two.steps[0].grad_norm):.1e}"
    yield from compare("weights of one and two", one, two)
    if options.kill:
        disturbed = run(folder / "kill", options, options.devices, {"drafter-1": [DIES]})
        numbers = [line.step for line in disturbed.steps]
        near = disturbed.steps[FATAL_STEP - 3 :]  # a step's line is written in the next step
        pause_s = max(after.time_s - before.time_s for before, after in itertools.pairwise(near))
        yield "one killed in a collective: longest time without a step", f"{pause_s:.1f} s"
        yield "steps that the other lost or made again", f"{len(numbers) - len(set(numbers))}"
        in_order = numbers == list(range(1, len(numbers) + 1))
        yield "every step once, in order", "yes" if in_order else "NO"
        yield from compare("weights, killed against undisturbed", disturbed, two)


def speedups(one: Trained, two: Trained) -> list[float]:
    """How much faster each step was; the same step has the same batches."""
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
    num_tokens = counts.of_steps(first.step + 1, last.step)
    return Trained(steps, num_tokens / (last.time_s - first.time_s), weights)


def make_workload(folder: Path, options: argparse.Namespace, devices: list[str]) -> Workload:
    """One epoch; the target that is named in it never runs."""
    settings = [f"plan.batches_per_step={BATCHES_PER_STEP}", "plan.epochs=1", "targets.compile=false", *options.overrides]
    return Workload.make(options.shape, folder, (["cpu"], devices), options.samples, settings)


def compare(what: str, some: Trained, other: Trained) -> Iterator[tuple[str, str]]:
    """How far the final weights are apart, beside how far both have come from nowhere."""
    if some.weights and other.weights:
        squares = [(some.weights[name].float() - value.float()).square().sum() for name, value in other.weights.items()]
        sizes = [value.float().square().sum() for value in other.weights.values()]
        yield f"{what}, relative difference", f"{float((sum(squares) / sum(sizes)) ** 0.5):.1e}"


def difference(some: float, other: float) -> float:
    """Relative."""
    return abs(some - other) / abs(other)


def main(arguments: list[str]) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m launch.bench scaling", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_8b")
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:1"], metavar="DEVICE")
    parser.add_argument("--steps", type=int, default=0, help="end each run at once behind this step")
    parser.add_argument("--samples", type=int, default=1000, help="rows of the data set, which is trained on once")
    parser.add_argument("--kill", action="store_true", help="also a run in which the second drafter dies in a collective")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    options = parser.parse_args(arguments)
    print(" ".join(arguments), flush=True)
    with tempfile.TemporaryDirectory(prefix="headrace-scaling-") as folder:
        for what, value in measure(Path(folder), options):
            print(f"{what:58} {value}", flush=True)
    return 0
