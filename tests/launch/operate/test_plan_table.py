"""The table of a plan, and the plan at the size of the reference run."""

import re

import numpy as np
import pytest

from launch.bench import __main__ as bench
from launch.bench.plan import BATCH_SHARES, SETTINGS, draw_lengths
from launch.operate.plan_table import format_plan
from services.exchange.samples import Samples
from tests.builders.small_runs import make_config, make_plan

LENGTHS = np.array([3, 4, 0, 8, 5, 7, 2, 8], np.int32)  # one of them is left out
NONE = np.zeros(0, np.int32)


def test_the_table_of_a_small_plan() -> None:
    """The batches are [2 3 4], [5 7], [8 8]: sorted by length, 3 and 2 rows a batch; 37 tokens of 44 computed."""
    config = make_config(buckets=(4, 8, 16), max_tokens=16, samples=3, epochs=2)
    plan = make_plan(config, LENGTHS, NONE)
    table = format_plan(plan, Samples(LENGTHS, "", 12), Samples(NONE, ""), config.plan)
    assert table.splitlines() == [
        "samples            7 (1 empty left out); 0 held out",
        "batches per epoch  3 of 2 to 3, on average 2.3, samples",
        "steps              3: 2 epochs, 2 batches a step",
        "tokens per epoch   37",
        "supervised         12 (32.4%)",
        "padding            15.91% of what the target computes",
        "        bucket     samples   batches   share  min  max    avg",
        "           1-4           3         1   33.3%    3    3    3.0",
        "           5-8           4         2   66.7%    2    2    2.0",
        "          9-16           0         0    0.0%",
    ]


def test_drawn_lengths_fill_the_buckets_as_the_reference_run_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["plan", "--samples", "110000"]) == 0
    out = capsys.readouterr().out
    shares = [float(share) / 100 for share in re.findall(r"^ +\d+-\d+ .* (\d+\.\d)%", out, re.MULTILINE)]
    assert shares == pytest.approx(BATCH_SHARES, abs=2e-3)
    padding = re.search(r"^padding +(\d+\.\d+)%", out, re.MULTILINE)
    assert padding and float(padding[1]) < 3
    assert "of 1 to 64, on average 18.3, samples" in re.sub(r"of \d to", "of 1 to", out)


def test_drawn_lengths_follow_the_seed_and_stay_in_the_buckets() -> None:
    lengths = draw_lengths(1000, seed=1)
    assert np.array_equal(lengths, draw_lengths(1000, seed=1)) and not np.array_equal(lengths, draw_lengths(1000, seed=2))
    assert len(lengths) == 1000 and lengths.min() >= 1 and lengths.max() <= SETTINGS.bucket_lengths[-1]


def test_an_unknown_measurement_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["nothing"]) == bench.main([]) == 2
    assert "plan" in capsys.readouterr().err
