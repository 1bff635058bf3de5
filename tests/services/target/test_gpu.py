"""The target on a GPU: the same weights and features as on a CPU, and no waiting in between."""

import numpy as np
import pytest
import torch

from common.ring.checksum import checksum
from common.weights import random_tensor
from services.target.pack import pack
from services.target.rows import make_rows

pytestmark = pytest.mark.gpu

LENGTHS = [300, 17, 1, 250]
PADDED_LENGTH = 304


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_weights_are_the_same_bits_on_every_device(dtype: torch.dtype) -> None:
    shape = (3001, 6000)  # more than one chunk
    on_gpu = random_tensor("x", shape, 0.02, 5, torch.device("cuda"), dtype)
    on_cpu = random_tensor("x", shape, 0.02, 5, torch.device("cpu"), dtype)
    assert torch.equal(on_gpu.cpu(), on_cpu)
    assert checksum(on_gpu).item() == checksum(on_cpu).item()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("hidden_size", [64, 5120, 1000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_packing_never_waits_for_the_gpu_and_gives_the_same_bits(dtype: torch.dtype, hidden_size: int, split: bool) -> None:
    """Taps in bfloat16, slots in bfloat16 or float32."""
    shape = (len(LENGTHS), PADDED_LENGTH, hidden_size)
    taps = [random_tensor(f"tap {tap}", shape, 1.0, 0, torch.device("cpu"), torch.bfloat16) for tap in range(3)]
    tokens = [np.zeros(length, np.int32) for length in LENGTHS]
    token_index = torch.from_numpy(make_rows(tokens, tokens, range(len(LENGTHS)), PADDED_LENGTH).token_index)
    out_shape = (3, sum(LENGTHS), hidden_size) if split else (sum(LENGTHS), 3, hidden_size)
    results = []
    for device in ("cpu", "cuda"):
        out, total = torch.empty(out_shape, dtype=dtype, device=device), torch.zeros((), dtype=torch.int64, device=device)
        on_device, index_there = [tap.to(device) for tap in taps], token_index.to(device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for tap, packed in zip(on_device, out if split else out.transpose(0, 1), strict=True):
                pack(tap, index_there, packed, total)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        results.append((out.cpu(), total.item()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == checksum(results[0][0]).item()


def test_float32_taps_are_rounded_to_bfloat16_as_on_a_cpu() -> None:
    tap, token_index = torch.randn(2, 8, 96), torch.arange(16, dtype=torch.int32)
    results = []
    for device in ("cpu", "cuda"):
        out = torch.empty(16, 96, dtype=torch.bfloat16, device=device)
        pack(tap.to(device), token_index.to(device), out, torch.zeros((), dtype=torch.int64, device=device))
        results.append(out.cpu())
    assert torch.equal(*results)
