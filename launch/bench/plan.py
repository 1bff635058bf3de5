"""The plan of a run at the size of the reference run: the table, and the time and memory that the exchange needs.

    python -m launch.bench plan --samples 1100000

The lengths fill the six buckets of the reference run so that these shares of its batches come out.
"""

import argparse
import resource
import time
import tomllib
from pathlib import Path

import msgspec
import numpy as np

from common.config import ActorsConfig, Config, DataConfig, ModelConfig, PlanConfig, TargetsConfig
from common.data.arrow_file import Int32Array
from common.draft_config import DraftConfig
from launch.operate.plan_table import format_plan
from services.exchange.plan import Plan, samples_per_batch
from services.exchange.samples import Samples

BATCH_SHARES = (0.038, 0.074, 0.105, 0.150, 0.166, 0.466)
_CONFIG = Path(__file__).parents[1] / "configs" / "qwen3_6_27b.toml"
SETTINGS = msgspec.convert(tomllib.loads(_CONFIG.read_text())["plan"], PlanConfig)  # of the reference run


def draw_lengths(num_samples: int, seed: int, settings: PlanConfig = SETTINGS) -> Int32Array:
    """Draw int32 [num_samples]: uniform within each bucket, in random order; fewer buckets keep the proportion of shares."""
    random = np.random.Generator(np.random.Philox(seed))
    shares = BATCH_SHARES[: len(settings.bucket_lengths)]
    weights = [share * samples_per_batch(settings, bucket) for bucket, share in enumerate(shares)]
    ends = np.rint(np.cumsum(weights) / sum(weights) * num_samples).astype(int)
    bounds = [0, *settings.bucket_lengths]
    counts = np.diff(ends, prepend=0)
    drawn = [random.integers(low + 1, high + 1, count) for low, high, count in zip(bounds, bounds[1:], counts, strict=False)]
    return random.permutation(np.concatenate(drawn)).astype(np.int32)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m launch.bench plan", description=__doc__)
    parser.add_argument("--samples", type=int, default=1_100_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    lengths = draw_lengths(options.samples, options.seed)
    before_mib = _peak_mib()
    began = time.perf_counter()
    plan = Plan(_config(options.seed), lengths, np.zeros(0, np.int32))
    made_s = time.perf_counter() - began
    plan.epoch(0), plan.epoch(1)  # as many as an exchange ever holds
    epochs_s = time.perf_counter() - began - made_s
    grown_mib = _peak_mib() - before_mib
    print(format_plan(plan, Samples(lengths, "", None), Samples(lengths[:0], ""), SETTINGS))
    print(f"plan {made_s:.2f} s, two epochs {epochs_s:.2f} s, memory {grown_mib:.0f} MiB more (peak {_peak_mib():.0f} MiB)")
    return 0


def _config(seed: int) -> Config:
    """Make a run without a model: the plan reads only the seed, the plan and the evaluation."""
    targets, drafters = TargetsConfig(devices=["cpu"]), ActorsConfig(devices=["cpu"])
    model, draft, data = ModelConfig(path=""), DraftConfig(mask_token_id=0), DataConfig(path="")
    return Config(seed=seed, model=model, draft=draft, data=data, plan=SETTINGS, targets=targets, drafters=drafters)


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
