"""The GPUs that a run needs are counted without torch, and as torch counts them."""

import pytest
import torch

from launch.operate.requirements import count_gpus


def test_a_hidden_gpu_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert count_gpus() == 0


@pytest.mark.gpu
def test_gpus_are_counted_as_torch_counts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert count_gpus() == torch.cuda.device_count() > 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "99")
    assert count_gpus() == 0
