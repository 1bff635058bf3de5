"""The checksum is exact and changes with any bit."""

import pytest
import torch

from common.ring.checksum import checksum
from common.weights import random_tensor

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_flipped_bit_changes_the_checksum(dtype: torch.dtype) -> None:
    tensor = random_tensor("x", (3, 5), 1.0, 0, CPU, dtype)
    width = tensor.element_size() * 8
    bits = tensor.view(torch.int16 if width == 16 else torch.int32).numpy().reshape(-1).view(f"uint{width}")
    expected = checksum(tensor).item()
    for index in range(len(bits)):
        for bit in range(width):
            bits[index] ^= 1 << bit
            assert checksum(tensor).item() != expected
            bits[index] ^= 1 << bit
    assert checksum(tensor).item() == expected


def test_the_checksum_of_a_known_tensor_is_exact_and_stays_on_the_device() -> None:
    result = checksum(torch.full((1 << 20,), -1, dtype=torch.int16).view(torch.bfloat16))
    assert (result.dtype, result.shape, result.item()) == (torch.int64, (), -(1 << 20))
