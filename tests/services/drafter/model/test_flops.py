"""What a step costs: counted operations, laps, traces."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from common.device.stopwatch import Stopwatch
from services.drafter.model.anchors import choose_blocks
from services.drafter.model.flops import batch_flops
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_loss
from services.drafter.training.profiler import StepProfiler
from tests.builders.batches import frozen_weights, make_batch, make_config


def test_counted_operations_are_those_of_the_products() -> None:
    config = make_config(["sliding_attention", "full_attention", "full_attention"], anchors_per_batch=32)
    batch = make_batch([40, 30])
    blocks = choose_blocks(batch, 0, config)
    assert blocks.label_mask.mean() > 0.9
    model = DraftModel(config)
    with FlopCounterMode(display=False) as counter:
        block_loss(model, *frozen_weights(), batch, blocks, config).loss.backward()  # type: ignore[no-untyped-call]
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    unseen = replace(blocks, anchors=np.zeros_like(blocks.anchors), documents=np.zeros_like(blocks.documents))
    pairs_within_blocks = 2 * 6 * 2 * 32 * 32 * 4 * 4  # two full layers: products and passes, heads * D, rows, block size
    pairs_within_blocks += 6 * 2 * 32 * 32 * (1 + 2 + 3 + 4)
    counted = batch_flops(config, unseen, batch.cu_seqlens) - pairs_within_blocks
    assert counted == pytest.approx(products, rel=0.1)
    assert counted < products
    assert batch_flops(config, blocks, batch.cu_seqlens) > batch_flops(config, unseen, batch.cu_seqlens)


def test_laps_follow_each_other() -> None:
    watch = Stopwatch(torch.device("cpu"))
    for name in ("first", "second"):
        watch.lap(name)
    laps = watch.laps_s()
    assert list(laps) == ["first", "second"]
    assert all(seconds >= 0 for seconds in laps.values())


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
