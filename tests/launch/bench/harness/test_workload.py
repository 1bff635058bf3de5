"""The runs that measurements make."""

from pathlib import Path

import numpy as np
import pytest

from common.data.dataset import Dataset
from launch.bench.harness.workload import TokenCounts, Workload
from launch.bench.plan import BATCH_SHARES
from services.exchange.plan import samples_per_batch


@pytest.fixture
def workload(tmp_path: Path) -> Workload:
    return Workload.make("tiny", tmp_path, (["cpu"], ["cpu", "cpu"]), 400, ["ring.num_slots=2"])


def test_its_rows_fill_the_buckets_as_the_reference_run_does(workload: Workload) -> None:
    config, dataset = workload.config, Dataset.open(Path(workload.config.data.path))
    counts = np.bincount(np.searchsorted(config.plan.bucket_lengths, dataset.lengths))
    batches = np.array([count / samples_per_batch(config.plan, bucket) for bucket, count in enumerate(counts)])
    assert batches / batches.sum() == pytest.approx(np.array(BATCH_SHARES[:3]) / sum(BATCH_SHARES[:3]), abs=0.02)
    sample = dataset.read(7)
    assert sample.loss_mask.tolist() == [token >= len(sample.input_ids) // 4 for token in range(len(sample.input_ids))]
    assert all(config.draft.mask_token_id not in dataset.read(row).input_ids for row in range(400))


def test_settings_that_are_given_win(workload: Workload) -> None:
    config = workload.config
    assert config.ring.num_slots == 2
    assert (config.num_targets, config.num_drafters, config.accumulation) == (1, 2, 2)
    assert config.model.random_init


def test_tokens_are_counted_by_the_plan(workload: Workload, tmp_path: Path) -> None:
    config, counts = workload.config, TokenCounts(workload.config)
    dataset = Dataset.open(Path(config.data.path))
    assert counts.of_steps(3, 5) == sum(counts.of_batch(batch) for batch in range(8, 20))
    num_steps = -(-sum(1 for _ in counts_of_an_epoch(counts, int(dataset.lengths.sum()))) // config.plan.batches_per_step)
    assert counts.of_steps(1, num_steps) >= int(dataset.lengths.sum())


def counts_of_an_epoch(counts: TokenCounts, num_tokens: int) -> "list[int]":
    """Return the tokens of each batch, from the start until every token was in one."""
    found: list[int] = []
    while sum(found) < num_tokens:
        found.append(counts.of_batch(len(found)))
    assert sum(found) == num_tokens
    return found
