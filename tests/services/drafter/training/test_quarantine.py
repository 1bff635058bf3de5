"""Records of steps that were not finite."""

import json
import math
from pathlib import Path

import pytest
import torch

from services.drafter.model.step_sums import StepSums
from services.drafter.training.quarantine import QuarantinedBatch, collect_facts, quarantine


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_facts_of_a_batch(dtype: torch.dtype) -> None:
    hidden = torch.tensor([[[1.0, -8.0], [math.nan, 2.0]], [[math.inf, -math.inf], [0.0, 4.0]]], dtype=dtype)
    facts = collect_facts(3, [5, 6], hidden, StepSums(torch.tensor([6.0, 4.0, 0.0, 1.0, 1.0, 1.0, 0.0])))
    record = QuarantinedBatch.of(facts, facts.facts.tolist())
    assert record == QuarantinedBatch(batch=3, sample_ids=[5, 6], num_nonfinite=3, largest_finite=8.0, loss=1.5)
    assert QuarantinedBatch.of(facts, [0.0, 0.0, 0.0, 0.0]).loss == 0.0  # a batch without a label


def test_a_file_is_strict_json(tmp_path: Path) -> None:
    batch = QuarantinedBatch(batch=3, sample_ids=[5, 6], num_nonfinite=1, largest_finite=8.0, loss=math.nan)
    quarantine(tmp_path, step=12, rank=1, loss=math.nan, grad_norm=-math.inf, batches=[batch])
    (path,) = (tmp_path / "quarantine").iterdir()
    assert path.name == "step-00000012-rank1.json"
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {
        "step": 12,
        "rank": 1,
        "loss": None,
        "grad_norm": None,
        "batches": [{"batch": 3, "sample_ids": [5, 6], "num_nonfinite": 1, "largest_finite": 8.0, "loss": None}],
    }


def test_a_disk_error_does_not_end_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "quarantine").write_text("in the way")
    quarantine(tmp_path, step=12, rank=1, loss=1.0, grad_norm=math.inf, batches=[])
    assert "step-00000012-rank1.json: not written: " in caplog.text
