"""Traces of a window of steps."""

import json
from pathlib import Path

import pytest
import torch

from services.drafter.training.profiler import StepProfiler


@pytest.mark.parametrize(("window", "num_products"), [([2, 3], 2), ([4, 9], 1), ([], None)])
def test_a_window_of_steps_is_traced(tmp_path: Path, window: list[int], num_products: int | None) -> None:
    path = tmp_path / "profile" / "drafter-0.json"
    profiler = StepProfiler(path, window)
    for step in range(1, 5):
        profiler.before(step)
        torch.ones(4, 4) @ torch.ones(4, 4)
        profiler.after(step)
    profiler.close()
    if num_products is None:
        assert not path.exists()
    else:
        events = json.loads(path.read_text())["traceEvents"]
        assert sum(event.get("name") == "aten::matmul" for event in events) == num_products
