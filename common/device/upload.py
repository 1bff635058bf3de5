"""Small arrays from the host to the device, without waiting."""

import numpy as np
import torch
from numpy.typing import NDArray


def upload(array: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """Copy to the device; a GPU copies from pinned memory, which torch keeps until the copy is done."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
