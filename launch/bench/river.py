"""A whole run under load: end to end, who waits for whom, what grows, what a kill costs, and each side alone.

    python -m launch.bench river --shape qwen3_6_27b --minutes 5 [--targets cuda:0] [--drafters cuda:1] [--kills]
        [--steps 200] [--alone-s 30] [--samples 4096] [--folder DIR] [--set KEY=VALUE ...]

A real `start_all` run of random weights on rows as long as real ones, checksums on. Rates count the tokens of
the steps between two lines of the drafter's metrics, once the run is under way. With `--kills` each actor is killed once,
afterwards; with `--steps` the run then goes on to that step. `--alone-s` measures for so long what the targets
deliver when nobody holds them up, and what the drafters train from resident slots. `tiny` runs on a CPU.
"""

import argparse
import itertools
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from launch.bench.harness.drain import Drain
from launch.bench.harness.feed import train
from launch.bench.harness.gpu_monitor import GpuMonitor
from launch.bench.harness.observation import Look, Observation, read_steps
from launch.bench.harness.stage import Stage
from launch.bench.harness.trial import Trial
from launch.bench.harness.workload import SHAPES, TokenCounts, Workload
from launch.operate.pace import WINDOW_S

START_TIMEOUT_S = 900
RECOVERY_TIMEOUT_S = 300
SETTLE_STEPS = 5  # before the first is counted: kernels are compiled and the ring is full by then
ACTORS = ("target-0", "drafter-0", "exchange")
Rows = Iterator[tuple[str, str]]
StepTimes = dict[int, float]  # step -> when it was done, on some clock


class River:
    """A run that goes on, and all that is observed of it."""

    def __init__(self, trial: Trial, gpus: GpuMonitor, counts: TokenCounts) -> None:
        self.trial = trial
        self.gpus = gpus
        self.counts = counts
        self.times: StepTimes = {}  # while nothing was disturbed
        self._process = trial.start()
        self.observation = Observation(self._process, trial.run_dir)

    def await_step(self, step: int, timeout_s: float) -> None:
        """Return when the drafter has written of this step."""
        self.observation.wait_until(lambda: any(line.step >= step for line in self.observation.steps()[-1:]), timeout_s)

    def end(self) -> None:
        """End it at once."""
        self._process.send_signal(signal.SIGTERM)
        time.sleep(0.5)
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self.observation.close()


def measure(river: River, options: argparse.Namespace) -> Rows:
    """The rows of the table, as they are measured."""
    began = time.time()
    river.await_step(SETTLE_STEPS, START_TIMEOUT_S)
    start_s = time.time()
    yield f"from the command to step {SETTLE_STEPS}", f"{start_s - began:.1f} s"
    river.observation.watch(options.minutes * 60)
    end_s = time.time()
    yield from steady_state(river, start_s, end_s)
    kills = ACTORS if options.kills == [] else options.kills or []
    for name in kills:
        yield from strike(river, name)
    if options.steps:
        river.await_step(options.steps, RECOVERY_TIMEOUT_S + options.steps * 10)
    if kills or options.steps:
        yield from growth(river, start_s, time.time(), "to the end")
    yield from soundness(river, sum(name.startswith("drafter") for name in kills))


def steady_state(river: River, start_s: float, end_s: float) -> Rows:
    """Speed and balance of a time in which nothing was disturbed."""
    looks = river.observation.between(start_s, end_s)
    steps = [line for line in river.observation.steps() if start_s <= line.time_s <= end_s]
    river.times = {line.step: line.time_s for line in steps}
    num_tokens = river.counts.of_steps(steps[0].step + 1, steps[-1].step)
    yield "steps counted", f"{len(steps)}"
    yield "tokens/s, end to end", f"{num_tokens / (steps[-1].time_s - steps[0].time_s):.0f}"
    periods = [after.time_s - before.time_s for before, after in itertools.pairwise(steps)]
    yield "seconds from step to step", f"median {statistics.median(periods):.3f}, longest {max(periods):.3f}"
    settled = [look for look in looks if look.time_s > start_s + WINDOW_S] or looks[-1:]
    waiting = [(look.status.targets_waiting, look.status.drafters_waiting) for look in settled]
    targets, drafters = ([share for share in side if share is not None] for side in zip(*waiting, strict=True))
    yield "waiting, share of the time", f"targets {statistics.mean(targets):.1%}, drafters {statistics.mean(drafters):.1%}"
    verdicts = Counter(look.status.verdict for look in settled)
    yield "verdict", f"{looks[-1].status.verdict} ({', '.join(f'{n} x {verdict}' for verdict, n in verdicts.items())})"
    yield "slots ready or being read, on average", f"{statistics.mean(map(ring_fill, looks)):.1%}"
    for index, samples in sorted(river.gpus.between(start_s, end_s).items()):
        yield f"GPU {index} busy (nvidia-smi)", f"{statistics.mean(sample.busy for sample in samples):.1%}"
    for name in ("target-0", "drafter-0"):
        medians_s = river.observation.medians_s(name, start_s, end_s)
        yield f"{name}, medians in ms", ", ".join(f"{key.removesuffix('_s')} {s * 1e3:.1f}" for key, s in medians_s.items())
    yield from growth(river, start_s, end_s, "over this time")


def ring_fill(look: Look) -> float:
    """Share of all slots that hold a batch for a drafter."""
    slots = [slot for ring in look.status.rings for slot in ring.slots]
    return sum(slot in ("ready", "reading") for slot in slots) / len(slots)


def growth(river: River, start_s: float, end_s: float, when: str) -> Rows:
    """Memory in the first and in the last tenth of a time."""
    tenth_s = max((end_s - start_s) / 10, 2.0)
    first, last = (start_s, start_s + tenth_s), (end_s - tenth_s, end_s)
    before, after = (river.observation.between(*part) for part in (first, last))
    for name in sorted(before[0].memory_mib):
        means = [statistics.mean(look.memory_mib.get(name, 0.0) for look in part) for part in (before, after)]
        yield f"memory of {name} {when}, MiB", f"{means[0]:.0f} -> {means[1]:.0f} ({means[1] - means[0]:+.1f})"
    gpus = river.gpus.between(*first), river.gpus.between(*last)
    for index in sorted(gpus[0].keys() & gpus[1].keys()):
        means = [statistics.mean(sample.memory_mib for sample in part[index]) for part in gpus]
        yield f"memory of GPU {index} {when}, MiB", f"{means[0]:.0f} -> {means[1]:.0f} ({means[1] - means[0]:+.0f})"


def strike(river: River, name: str) -> Rows:
    """Kill an actor under load and see it come back."""
    observation = river.observation
    pid, step_before = observation.looks[-1].pids[name], observation.steps()[-1].step
    before_s = time.time() - 5.0
    killed_s = observation.kill(name)

    def is_back() -> bool:
        if not observation.looks:
            return False
        actors = {actor.name: actor for actor in observation.looks[-1].status.actors}
        return actors[name].state == "ready" and observation.looks[-1].pids.get(name) not in (None, pid)

    observation.wait_until(is_back, RECOVERY_TIMEOUT_S)
    back_s = time.time()
    observation.wait_until(lambda: sum(line.time_s > back_s for line in observation.steps()) > 2, RECOVERY_TIMEOUT_S)
    works = [line for line in observation.steps() if line.time_s > killed_s]
    times = [killed_s, *(line.time_s for line in works)]
    pause_s = max(after - before for before, after in itertools.pairwise(times))
    repeated = max(0, step_before - min(line.step for line in works) + 1)
    yield f"{name} killed: back at work after", f"{back_s - killed_s:.1f} s"
    yield f"{name} killed: longest time without a step", f"{pause_s:.1f} s; {repeated} steps repeated"
    for index, samples in sorted(river.gpus.between(killed_s, time.time()).items()):
        before = statistics.mean(sample.memory_mib for sample in river.gpus.between(before_s, killed_s)[index])
        lowest, after = min(sample.memory_mib for sample in samples), samples[-1].memory_mib
        yield f"{name} killed: memory of GPU {index}, MiB", f"{before:.0f} -> {lowest:.0f} -> {after:.0f}"


def soundness(river: River, num_returns: int) -> Rows:
    """What must not have happened; a lone drafter that was killed goes back to the last checkpoint, or to the start."""
    steps = [line.step for line in river.observation.steps()]
    jumps = [after - before for before, after in itertools.pairwise(steps)]
    backwards, forwards = sum(jump < 1 for jump in jumps), sum(jump > 1 for jump in jumps)
    skipped = sum(line.skipped for line in river.observation.steps())
    outcome = river.trial.outcome(0)
    in_order = forwards == 0 and backwards <= num_returns
    yield "every step once, in order", f"{'yes' if in_order else 'NO'}: {len(set(steps))} steps, {backwards} times back"
    yield "steps that were not finite", f"{skipped}"
    yield "batches that arrived damaged", f"{outcome.num_rejected}"
    yield "batches computed again", f"{outcome.num_batches_again}"
    yield "restarts", f"{river.observation.looks[-1].status.restarts}"


def targets_alone(workload: Workload, duration_s: float) -> StepTimes:
    """What the targets make when every slot is free again at once."""
    size, config = workload.config.plan.batches_per_step, workload.config
    with Stage(config, "targets") as stage:
        targets = [*stage.start("exchange"), *stage.start("target")]
        drain = Drain(stage.run_dir)
        stage.await_ready(targets)
        while len(drain.taken) < SETTLE_STEPS * size:
            stage.check()
            time.sleep(0.1)
        time.sleep(duration_s)
        stage.check()
        drain.close()
    times = {(batch + 1) // size: time_s for batch, time_s in drain.taken if (batch + 1) % size == 0}
    return {step: time_s for step, time_s in times.items() if step >= SETTLE_STEPS}


def drafters_alone(workload: Workload, duration_s: float) -> StepTimes:
    """What the drafters train on when every batch is there already."""
    with Stage(workload.config, "drafters") as stage:
        train(stage, lambda: _lasted_s(stage.run_dir) > duration_s)
        return {line.step: line.time_s for line in read_steps(stage.run_dir) if line.step >= SETTLE_STEPS}


def sides(workload: Workload, duration_s: float, river: River) -> Rows:
    """Each side alone, and what the run reaches of the slower one; every comparison is over the same batches."""
    reached = []
    for what, alone in (("targets alone", targets_alone), ("drafters alone, from resident slots", drafters_alone)):
        times = alone(workload, duration_s)
        common = sorted(times.keys() & river.times.keys())
        first, last = common[0], common[-1]
        num_tokens = river.counts.of_steps(first + 1, last)
        yield f"tokens/s, {what}", f"{num_tokens / (times[last] - times[first]):.0f} (steps {first + 1} to {last})"
        reached.append((times[last] - times[first]) / (river.times[last] - river.times[first]))
        yield f"end to end over {what}", f"{reached[-1]:.3f}"
    yield "end to end over the slower side (wanted 0.97)", f"{max(reached):.3f}"


def _lasted_s(run_dir: Path) -> float:
    times = [line.time_s for line in read_steps(run_dir) if line.step >= SETTLE_STEPS]
    return times[-1] - times[0] if times else 0.0


def main(arguments: list[str]) -> int:
    """Print the table."""
    options = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="headrace-river-", dir=options.folder) as folder:
        devices = options.targets, options.drafters
        workload = Workload.make(options.shape, Path(folder), devices, options.samples, options.overrides)
        print(f"{' '.join(arguments)}: rows of the plan, batches of up to {workload.config.plan.max_tokens_per_batch} tokens")
        trial = Trial(Path(folder) / "run", workload.overrides, config=workload.path)
        with GpuMonitor() as gpus:
            river = River(trial, gpus, TokenCounts(workload.config))
            try:
                for what, value in measure(river, options):
                    print(f"{what:58} {value}", flush=True)
            finally:
                river.end()
        if options.alone_s:
            for what, value in sides(workload, options.alone_s, river):
                print(f"{what:58} {value}", flush=True)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m launch.bench river", description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3_6_27b")
    parser.add_argument("--minutes", type=float, default=1.0, help="of the undisturbed time that is measured")
    parser.add_argument("--targets", nargs="+", default=["cuda:0"], metavar="DEVICE")
    parser.add_argument("--drafters", nargs="+", default=["cuda:1"], metavar="DEVICE")
    parser.add_argument("--kills", nargs="*", metavar="ACTOR", help=f"kill these once, afterwards; without names {ACTORS}")
    parser.add_argument("--steps", type=int, default=0, help="then go on to this step")
    parser.add_argument("--alone-s", type=float, default=0.0, help="seconds for each side alone")
    parser.add_argument("--samples", type=int, default=4096, help="rows of the data set")
    parser.add_argument("--folder", help="for the data set and the run directory, instead of the one for temporary files")
    parser.add_argument("--set", dest="overrides", nargs="+", action="extend", default=[], metavar="KEY=VALUE")
    return parser.parse_args(arguments)
