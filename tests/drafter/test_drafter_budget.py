"""The anchor budget: the balance, the measurement that leaves no trace, and the limits."""

import msgspec
import pytest
import torch
from made_up_batches import BLOCK_SIZE, frozen_weights, make_config

from common.anchor_budget import BatchCost
from common.config import Config
from services.drafter.budget import Trainee, balanced_anchors, measure_cost, with_anchors
from services.drafter.model import DraftModel
from services.drafter.optimizer import MasterAdamW
from services.drafter.step import num_sums


def plan_of(max_tokens: int, max_samples: int) -> Config:
    config = make_config()
    plan = msgspec.structs.replace(config.plan, max_tokens_per_batch=max_tokens, max_samples_per_batch=max_samples)
    return msgspec.structs.replace(config, plan=plan)


def test_drafters_take_as_many_batches_as_the_targets_make() -> None:
    config, costs = plan_of(16384, 8), [BatchCost(0.1, 1e-4, 10**6), BatchCost(0.2, 2e-4, 10**6)]
    anchors = balanced_anchors(costs, batches_per_s=4.0, config=config)
    assert anchors == 1472  # 2 drafters / 4 a second - 0.2 s leave 0.3 s for 1,500 anchors of the slower; tiles of 32
    assert balanced_anchors(costs[:1], 4.0, config) == 1472  # (1 / 4 - 0.1) / 1e-4 = 1,500
    assert balanced_anchors(costs[:1] * 3, 4.0, config) == 6496


@pytest.mark.parametrize(
    ("batches_per_s", "max_anchors", "max_samples", "expected"),
    [(1e-6, 10**9, 8, 16384), (1e-6, 1000, 8, 992), (1e6, 10**9, 8, 32), (1e6, 10**9, 40, 64), (1e6, 3, 40, 64)],
)
def test_a_budget_has_limits(batches_per_s: float, max_anchors: int, max_samples: int, expected: int) -> None:
    cost = BatchCost(0.1, 1e-4, max_anchors)
    assert balanced_anchors([cost], batches_per_s, plan_of(16384, max_samples)) == expected


def test_measuring_changes_no_bit() -> None:
    config = with_anchors(make_config(), 16)
    model = DraftModel(config)
    optimizer = MasterAdamW(model, config.train, 10, num_sums(BLOCK_SIZE) + 1)
    before = {name: tensor.clone() for name, tensor in [*optimizer.state_dict().items(), *model.state_dict().items()]}
    cost = measure_cost(Trainee(model, frozen_weights(), optimizer), config)
    after = {**optimizer.state_dict(), **model.state_dict()}
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not optimizer.gradients.sums.any()
    assert cost.seconds >= 0
    assert cost.seconds_per_anchor > 0
    assert cost.max_anchors > 16384
