"""A whole run under load: end to end, which side waits, memory growth, the cost of a kill, and each side alone.

    python -m launch.bench river --shape qwen3_6_27b --minutes 5 [--targets cuda:0] [--drafters cuda:1] [--kills]
        [--steps 200] [--alone-s 30] [--samples 4096] [--folder DIR] [--set KEY=VALUE ...]

A real `start_all` run of random weights on rows with lengths of the reference run, checksums on. Rates count the tokens of
the steps between two lines of the drafter's metrics, once the run is under way. With `--kills` each actor is killed once,
afterwards; with `--steps` the run then goes on to that step. `--alone-s` measures for so long the targets with every slot
free at once, and the drafters with every batch there already. `tiny` runs on a CPU.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from launch.bench.harness.gpu_monitor import GpuMonitor, GpuSample
from launch.bench.harness.observation import Observation, Sample
from launch.bench.harness.peers import Drain, train
from launch.bench.harness.stage import Stage
from launch.bench.harness.table import Rows, make_parser, print_rows
from launch.bench.harness.trial import Trial, longest_pause_s, read_steps
from launch.bench.harness.workload import SHAPES, TokenCounts, Workload
from launch.operate.pace import WINDOW_S

START_TIMEOUT_S = 900
RECOVERY_TIMEOUT_S = 300
SETTLE_STEPS = 5  # before the first is counted: kernels are compiled and the ring is full by then
ACTORS = ("target-0", "drafter-0", "exchange")
StepTimes = dict[int, float]  # step -> when it was done, on some clock


@dataclass
class LoadedRun:
    """A run that goes on, all that observes it, and the tokens of its steps."""

    observation: Observation
    gpus: GpuMonitor
    counts: TokenCounts
    undisturbed: StepTimes = field(default_factory=dict)


def measure(run: LoadedRun, options: argparse.Namespace) -> Rows:
    """Yield the rows of the table, as they are measured."""
    began_s, observation = time.time(), run.observation
    observation.await_step(SETTLE_STEPS, START_TIMEOUT_S)
    start_s = time.time()
    yield f"from the command to step {SETTLE_STEPS}", f"{start_s - began_s:.1f} s"
    observation.watch(options.minutes * 60)
    yield from steady_state(run, start_s, time.time())
    kills = ACTORS if options.kills == [] else options.kills or []
    for name in kills:
        yield from kill(run, name)
    if options.steps:
        observation.await_step(options.steps, RECOVERY_TIMEOUT_S + options.steps * 10)
    if kills or options.steps:
        yield from growth(run, start_s, time.time(), "to the end")
    yield from soundness(run, sum(name.startswith("drafter") for name in kills))


def steady_state(run: LoadedRun, start_s: float, end_s: float) -> Rows:
    """Yield speed and balance of a time in which nothing was disturbed."""
    samples = run.observation.between(start_s, end_s)
    steps = [line for line in run.observation.steps() if start_s <= line.time_s <= end_s]
    run.undisturbed = {line.step: line.time_s for line in steps}
    num_tokens = run.counts.of_steps(steps[0].step + 1, steps[-1].step)
    yield "steps counted", f"{len(steps)}"
    yield "tokens/s, end to end", f"{num_tokens / (steps[-1].time_s - steps[0].time_s):.0f}"
    periods = [after.time_s - before.time_s for before, after in itertools.pairwise(steps)]
    yield "seconds from step to step", f"median {statistics.median(periods):.3f}, longest {max(periods):.3f}"
    statuses = [sample.status for sample in samples if sample.time_s > start_s + WINDOW_S] or [samples[-1].status]
    targets = statistics.mean(status.targets_waiting for status in statuses if status.targets_waiting is not None)
    drafters = statistics.mean(status.drafters_waiting for status in statuses if status.drafters_waiting is not None)
    yield "waiting, share of the time", f"targets {targets:.1%}, drafters {drafters:.1%}"
    verdicts = Counter(status.verdict for status in statuses)
    yield "verdict", f"{statuses[-1].verdict} ({', '.join(f'{n} x {verdict}' for verdict, n in verdicts.items())})"
    yield "slots ready or being read, on average", f"{statistics.mean(map(ring_fill, samples)):.1%}"
    for index, found in run.gpus.between(start_s, end_s).items():
        yield f"GPU {index} busy (nvidia-smi)", f"{statistics.mean(sample.busy for sample in found):.1%}"
    for name in ("target-0", "drafter-0"):
        medians_s = run.observation.medians_s(name, start_s, end_s)
        yield f"{name}, medians in ms", ", ".join(f"{key.removesuffix('_s')} {s * 1e3:.1f}" for key, s in medians_s.items())
    yield from growth(run, start_s, end_s, "over this time")


def ring_fill(sample: Sample) -> float:
    """Return the share of all slots that hold a batch for a drafter."""
    slots = [slot for ring in sample.status.rings for slot in ring.slots]
    return sum(slot in ("ready", "reading") for slot in slots) / len(slots)


def growth(run: LoadedRun, start_s: float, end_s: float, when: str) -> Rows:
    """Yield the memory in the first and in the last tenth of a time."""
    tenth_s = max((end_s - start_s) / 10, 2.0)
    first, last = (start_s, start_s + tenth_s), (end_s - tenth_s, end_s)
    before, after = run.observation.between(*first), run.observation.between(*last)
    for name in sorted(before[0].memory_mib):
        means = [statistics.mean(sample.memory_mib.get(name, 0.0) for sample in part) for part in (before, after)]
        yield f"memory of {name} {when}, MiB", f"{means[0]:.0f} -> {means[1]:.0f} ({means[1] - means[0]:+.1f})"
    gpus_before, gpus_after = run.gpus.between(*first), run.gpus.between(*last)
    for index in sorted(gpus_before.keys() & gpus_after.keys()):
        means = [mean_memory(part[index]) for part in (gpus_before, gpus_after)]
        yield f"memory of GPU {index} {when}, MiB", f"{means[0]:.0f} -> {means[1]:.0f} ({means[1] - means[0]:+.0f})"


def mean_memory(samples: list[GpuSample]) -> float:
    return statistics.mean(sample.memory_mib for sample in samples)


def kill(run: LoadedRun, name: str) -> Rows:
    """Kill an actor under load and wait until it works again."""
    observation = run.observation
    pid, step_before = observation.samples[-1].pids[name], observation.steps()[-1].step
    before_s = time.time() - 5.0
    killed_s = observation.kill(name)

    def is_back() -> bool:
        latest = observation.samples[-1]
        return latest.pids.get(name) not in (None, pid) and ready(latest, name)

    observation.wait_until(is_back, RECOVERY_TIMEOUT_S)
    back_s = time.time()
    observation.wait_until(lambda: sum(line.time_s > back_s for line in observation.steps()) > 2, RECOVERY_TIMEOUT_S)
    steps = [line for line in observation.steps() if line.time_s > killed_s]
    repeated = max(0, step_before - min(line.step for line in steps) + 1)
    pause_s = longest_pause_s([killed_s, *(line.time_s for line in steps)])
    yield f"{name} killed: back at work after", f"{back_s - killed_s:.1f} s"
    yield f"{name} killed: longest time without a step", f"{pause_s:.1f} s; {repeated} steps repeated"
    for index, samples in run.gpus.between(killed_s, time.time()).items():
        before = mean_memory(run.gpus.between(before_s, killed_s)[index])
        lowest, after = min(sample.memory_mib for sample in samples), samples[-1].memory_mib
        yield f"{name} killed: memory of GPU {index}, MiB", f"{before:.0f} -> {lowest:.0f} -> {after:.0f}"


def ready(sample: Sample, name: str) -> bool:
    return any(actor.name == name and actor.state == "ready" for actor in sample.status.actors)


def soundness(run: LoadedRun, num_returns: int) -> Rows:
    """Yield counts of errors; a lone drafter that was killed goes back to the last checkpoint, or to the start."""
    lines = run.observation.steps()
    jumps = [after.step - before.step for before, after in itertools.pairwise(lines)]
    num_back, outcome = sum(jump < 1 for jump in jumps), run.observation.trial.outcome(0)
    in_order = max(jumps) <= 1 and num_back <= num_returns
    num_steps = len({line.step for line in lines})
    yield "every step once, in order", f"{'yes' if in_order else 'NO'}: {num_steps} steps, {num_back} times back"
    yield "steps that were not finite", f"{sum(line.skipped for line in lines)}"
    yield "batches that arrived damaged", f"{outcome.num_rejected}"
    yield "batches computed again", f"{outcome.num_batches_again}"
    yield "restarts", f"{run.observation.samples[-1].status.restarts}"


def targets_alone(workload: Workload, duration_s: float) -> StepTimes:
    """Run the targets with every slot free again at once; return when the batches of each step were there."""
    size, config = workload.config.plan.batches_per_step, workload.config
    with Stage(config, "targets") as stage:
        actors = [*stage.start("exchange"), *stage.start("target")]
        drain = Drain(stage.run_dir)
        stage.await_ready(actors)
        while len(drain.taken) < SETTLE_STEPS * size:
            stage.check()
            time.sleep(0.1)
        time.sleep(duration_s)
        stage.check()
        drain.close()
    times = {(batch + 1) // size: time_s for batch, time_s in drain.taken if (batch + 1) % size == 0}
    return {step: time_s for step, time_s in times.items() if step >= SETTLE_STEPS}


def drafters_alone(workload: Workload, duration_s: float) -> StepTimes:
    """Run the drafters with every batch there already; return when each step was done."""
    with Stage(workload.config, "drafters") as stage:

        def times() -> StepTimes:
            return {line.step: line.time_s for line in read_steps(stage.run_dir) if line.step >= SETTLE_STEPS}

        def is_over() -> bool:
            times_s = times().values()
            return bool(times_s) and max(times_s) - min(times_s) > duration_s

        train(stage, is_over)
        return times()


def compare_alone(workload: Workload, duration_s: float, run: LoadedRun) -> Rows:
    """Yield the speed of each side alone, and how near the run comes to the slower one, over the same batches."""
    reached = []
    for name, alone in (("targets alone", targets_alone), ("drafters alone, from resident slots", drafters_alone)):
        times = alone(workload, duration_s)
        common = sorted(times.keys() & run.undisturbed.keys())
        first, last = common[0], common[-1]
        alone_s, together_s = times[last] - times[first], run.undisturbed[last] - run.undisturbed[first]
        yield f"tokens/s, {name}", f"{run.counts.of_steps(first + 1, last) / alone_s:.0f} (steps {first + 1} to {last})"
        reached.append(alone_s / together_s)
        yield f"end to end over {name}", f"{reached[-1]:.3f}"
    yield "end to end over the slower side (wanted 0.97)", f"{max(reached):.3f}"


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="headrace-run-", dir=options.folder) as folder:
        devices = options.targets, options.drafters
        workload = Workload.make(options.shape, Path(folder), devices, options.samples, options.overrides)
        print(f"{' '.join(arguments)}: rows of the plan, batches of up to {workload.config.plan.max_tokens_per_batch} tokens")
        trial = Trial(Path(folder) / "run", workload.overrides, config=workload.path)
        with GpuMonitor() as gpus:
            run = LoadedRun(Observation(trial), gpus, TokenCounts(workload.config))
            try:
                print_rows(measure(run, options))
            finally:
                run.observation.end()
        if options.alone_s:
            print_rows(compare_alone(workload, options.alone_s, run))
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("river", __doc__, SHAPES, "qwen3_6_27b")
    parser.add_argument("--minutes", type=float, default=1.0, help="of the undisturbed time that is measured")
    parser.add_argument("--targets", nargs="+", default=["cuda:0"], metavar="DEVICE")
    parser.add_argument("--drafters", nargs="+", default=["cuda:1"], metavar="DEVICE")
    parser.add_argument("--kills", nargs="*", metavar="ACTOR", help=f"kill these once, afterwards; without names {ACTORS}")
    parser.add_argument("--steps", type=int, default=0, help="then go on to this step")
    parser.add_argument("--alone-s", type=float, default=0.0, help="seconds for each side alone")
    parser.add_argument("--samples", type=int, default=4096, help="rows of the data set")
    parser.add_argument("--folder", help="for the data set and the run directory, instead of the one for temporary files")
    return parser.parse_args(arguments)
