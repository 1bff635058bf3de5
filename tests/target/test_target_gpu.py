"""What the target does on a GPU: the same weights and features as on a CPU, and no waiting in between."""

import pytest
import torch

from common.checksum import checksum
from common.weights import random_tensor
from services.target.pack import pack

pytestmark = pytest.mark.gpu

LENGTHS = [300, 17, 1, 250]
SHAPE = (len(LENGTHS), max(LENGTHS), 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_random_weights_are_the_same_bits_on_every_device(dtype: torch.dtype) -> None:
    shape = (3001, 6000)  # more than one chunk
    on_gpu = random_tensor("x", shape, 0.02, 5, torch.device("cuda"), dtype)
    on_cpu = random_tensor("x", shape, 0.02, 5, torch.device("cpu"), dtype)
    assert torch.equal(on_gpu.cpu(), on_cpu)
    assert checksum(on_gpu).item() == checksum(on_cpu).item()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_packing_never_waits_for_the_gpu_and_gives_the_same_bits(split: bool) -> None:
    taps = [random_tensor(f"tap {tap}", SHAPE, 1.0, 0, torch.device("cpu"), torch.bfloat16) for tap in range(3)]
    shape = (3, sum(LENGTHS), 64) if split else (sum(LENGTHS), 3, 64)
    expected, out = torch.empty(shape, dtype=torch.bfloat16), torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    pack(taps, LENGTHS, expected, split=split)
    on_gpu = [tap.cuda() for tap in taps]
    torch.cuda.set_sync_debug_mode("error")
    try:
        pack(on_gpu, LENGTHS, out, split=split)
        total = checksum(out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(out.cpu(), expected)
    assert total.item() == checksum(expected).item()
