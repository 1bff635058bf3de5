"""The memory that a process may have of a GPU follows its own limit."""

import pytest
import torch

from common.device.memory import allowed_bytes, describe_peak, take_device
from common.errors import ConfigError


def test_a_cpu_has_no_peak() -> None:
    assert describe_peak(torch.device("cpu")) == ""


@pytest.mark.gpu
def test_a_limit_of_the_process_counts() -> None:
    device = torch.device("cuda:0")
    free, total = torch.cuda.mem_get_info(device)
    assert free <= allowed_bytes(device) <= total
    torch.cuda.set_per_process_memory_fraction(0.01)
    try:
        assert allowed_bytes(device) == int(total * 0.01)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert "GiB of device memory in use" in describe_peak(device)


def test_a_gpu_that_is_not_there_is_named() -> None:
    assert take_device("cpu", "targets.devices") == torch.device("cpu")
    with pytest.raises(ConfigError, match=r"targets\.devices: needed cuda:99, found \d+ GPUs"):
        take_device("cuda:99", "targets.devices")
