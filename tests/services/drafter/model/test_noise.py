"""Noise on features depends on the sample, not on its company."""

import numpy as np
import pytest
import torch
from torch import Tensor

from services.drafter.model.batch import PackedBatch
from services.drafter.model.noise import add_noise
from tests.builders.batches import make_batch, make_config


def noise_of(batch: PackedBatch, epoch: int = 0, kind: str = "uniform") -> Tensor:
    noisy = add_noise(batch, epoch, make_config(noise=kind)).hidden_states
    return noisy - batch.hidden_states


def test_off_is_no_copy() -> None:
    batch = make_batch([5])
    assert add_noise(batch, 0, make_config()) is batch


@pytest.mark.parametrize("kind", ["uniform", "gaussian"])
def test_noise_depends_on_sample_and_epoch_only(kind: str) -> None:
    pair = make_batch([6, 9])
    alone = make_batch([9])
    alone.sample_ids[:] = pair.sample_ids[1]
    torch.testing.assert_close(noise_of(pair, kind=kind)[6:], noise_of(alone, kind=kind), rtol=0, atol=1e-6)
    assert not torch.allclose(noise_of(alone, kind=kind), noise_of(alone, epoch=1, kind=kind), atol=1e-3)


def test_noise_has_the_configured_size() -> None:
    batch = make_batch([60])
    uniform, gaussian = noise_of(batch), noise_of(batch, kind="gaussian")
    assert 0.045 < uniform.abs().max() <= 0.0501
    assert gaussian.std().item() == pytest.approx(0.05, rel=0.1)
    assert np.abs(uniform.mean().item()) < 0.005
