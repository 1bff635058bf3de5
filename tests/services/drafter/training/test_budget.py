"""The anchor budget: the balance, the measurement that changes nothing, and the limits."""

import msgspec
import pytest
import torch

from common.actor.messages import BatchShape
from common.config import Config
from services.drafter.model.anchors import choose_blocks
from services.drafter.model.model import DraftModel
from services.drafter.training.budget import BatchCost, balanced_anchors, mean_anchors, measure_cost, with_anchors
from services.drafter.training.optimizer import MasterAdamW
from services.drafter.training.training_state import TrainingState, full_shape, make_up_batch
from tests.builders.batches import BLOCK_SIZE, frozen_weights, make_config

FULL = [BatchShape(8, 2048, 100)]  # no batch has fewer documents than its budget has room for


def plan_of(max_tokens: int, max_samples: int, anchors_per_document: int = 4096) -> Config:
    config = make_config(anchors_per_document=anchors_per_document)
    plan = msgspec.structs.replace(config.plan, max_tokens_per_batch=max_tokens, max_samples_per_batch=max_samples)
    return msgspec.structs.replace(config, plan=plan)


def test_drafters_take_as_many_batches_as_the_targets_make() -> None:
    config, costs = plan_of(16384, 8), [BatchCost(0.1, 1e-4, 10**6), BatchCost(0.2, 2e-4, 10**6)]
    anchors = balanced_anchors(costs, 4.0, FULL, config)
    assert anchors == 1472  # 2 drafters / 4 a second - 0.2 s leave 0.3 s for 1,500 anchors of the slower; tiles of 32
    assert balanced_anchors(costs[:1], 4.0, FULL, config) == 1472  # (1 / 4 - 0.1) / 1e-4 = 1,500
    assert balanced_anchors(costs[:1] * 3, 4.0, FULL, config) == 6496


def test_anchors_that_small_batches_cannot_use_go_to_the_others() -> None:
    config, shapes = plan_of(16384, 8, anchors_per_document=512), [BatchShape(2, 8192, 30), BatchShape(8, 2048, 70)]
    assert mean_anchors(1024, shapes, config) == 1024
    assert mean_anchors(2048, [*shapes, BatchShape(1, 100, 0)], config) == pytest.approx(0.3 * 1024 + 0.7 * 2048)
    budget = balanced_anchors([BatchCost(0.1, 1e-4, 10**6)], 4.0, shapes, config)
    assert mean_anchors(budget, shapes, config) <= 1500 < mean_anchors(budget + 32, shapes, config)
    assert budget == 1696  # (1,500 - 0.3 * 1,024) / 0.7 = 1,704


@pytest.mark.parametrize(
    ("batches_per_s", "max_anchors", "max_samples", "expected"),
    [(1e-6, 10**9, 8, 16384), (1e-6, 1000, 8, 992), (1e6, 10**9, 8, 32), (1e6, 10**9, 40, 64), (1e6, 3, 40, 64)],
)
def test_a_budget_has_limits(batches_per_s: float, max_anchors: int, max_samples: int, expected: int) -> None:
    cost = BatchCost(0.1, 1e-4, max_anchors)
    assert balanced_anchors([cost], batches_per_s, FULL, plan_of(16384, max_samples)) == expected


def test_a_timed_batch_has_all_its_anchors() -> None:
    config = with_anchors(make_config(anchors_per_document=1), anchors_per_batch=64, anchors_per_document=64)
    batch = make_up_batch(*full_shape(config), config, torch.device("cpu"))
    blocks = choose_blocks(batch, 0, config)
    assert blocks.valid.sum() == len(blocks.anchors) == 64


def test_a_measurement_changes_no_bit() -> None:
    config = make_config()
    model = DraftModel(config)
    optimizer = MasterAdamW(model, config.train, 10, BLOCK_SIZE)
    before = {name: tensor.clone() for name, tensor in [*optimizer.state_dict().items(), *model.state_dict().items()]}
    cost = measure_cost(TrainingState(model, frozen_weights(), optimizer), config)
    after = {**optimizer.state_dict(), **model.state_dict()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not optimizer.gradients.sums.values.any()
    assert cost.seconds >= 0
    assert cost.seconds_per_anchor > 0
    assert cost.max_anchors > 16384
