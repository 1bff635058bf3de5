"""Counted operations of a step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from services.drafter.model.anchors import choose_blocks
from services.drafter.model.flops import batch_flops
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_loss
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
