"""The checksum of a tensor in transit, computed by the target before a copy and by the drafter after it."""

import torch

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """Sum the bits of a contiguous tensor's elements as integers of the same width: an int64 scalar on its device.

    The sum is exact, so it is equal for the same elements in any layout, and any single changed bit changes it.
    """
    return tensor.view(_INTEGERS[tensor.element_size()]).sum(dtype=torch.int64)
