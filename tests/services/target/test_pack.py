"""From padded taps to the packed features of a slot: the torch path, and the kernel in Triton's interpreter or on a GPU."""

import numpy as np
import pytest
import torch

from common.ring.checksum import checksum
from services.target import pack_kernel
from services.target.pack import pack
from services.target.rows import TargetRows, make_rows

LENGTHS, PADDED_LENGTH = [5, 2, 7], 9
NUM_TOKENS, NUM_TAPS = sum(LENGTHS), 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def rows_of(lengths: list[int], padded_length: int) -> TargetRows:
    tokens = [np.arange(length) for length in lengths]
    return make_rows(tokens, tokens, range(len(lengths)), padded_length)


def make_taps(hidden_size: int) -> list[torch.Tensor]:
    """Make taps whose elements name their tap, row, token and column; the padding is NaN."""
    taps = []
    for tap in range(NUM_TAPS):
        rows = torch.full((len(LENGTHS), PADDED_LENGTH, hidden_size), torch.nan)
        for row, length in enumerate(LENGTHS):
            elements = torch.arange(length * hidden_size).view(length, hidden_size)
            rows[row, :length] = 1000 * tap + 100 * row + elements
        taps.append(rows)
    return taps


def real_rows(taps: list[torch.Tensor]) -> torch.Tensor:
    """[K, T, H]"""
    return torch.stack([torch.cat([rows[row, :length] for row, length in enumerate(LENGTHS)]) for rows in taps])


def pack_all(taps: list[torch.Tensor], dtype: torch.dtype, *, split: bool) -> tuple[torch.Tensor, int]:
    """Return the buffer in the layout of a slot, and its checksum."""
    token_index = torch.from_numpy(rows_of(LENGTHS, PADDED_LENGTH).token_index)
    shape = (NUM_TAPS, NUM_TOKENS) if split else (NUM_TOKENS, NUM_TAPS)
    buffer, total = torch.empty(*shape, taps[0].shape[-1], dtype=dtype), torch.zeros((), dtype=torch.int64)
    for tap, packed in zip(taps, buffer if split else buffer.transpose(0, 1), strict=True):
        pack(tap, token_index, packed, total)
    return buffer, int(total)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_both_layouts_hold_the_real_rows_bit_for_bit(dtype: torch.dtype, split: bool) -> None:
    taps = make_taps(4)
    buffer, total = pack_all(taps, dtype, split=split)
    assert torch.equal(buffer if split else buffer.transpose(0, 1), real_rows(taps).to(dtype))
    assert total == int(checksum(buffer))


def test_packing_takes_the_states_of_a_forward_without_gradients() -> None:
    """The taps are inference tensors; the buffer of a slot is not, and is written again and again."""
    with torch.inference_mode():
        taps = [tap * 2 for tap in make_taps(4)]
        buffer, _ = pack_all(taps, torch.float32, split=True)
    assert torch.equal(buffer, real_rows(make_taps(4)) * 2)


def test_the_checksum_wraps_around_as_int64_does() -> None:
    total = torch.tensor(2**63 - 1)
    pack(torch.ones(1, 2, 3), torch.zeros(2, dtype=torch.int32), torch.empty(2, 3), total)
    assert int(total) == -(2**63) - 1 + int(checksum(torch.ones(2, 3)))


@pytest.mark.parametrize("num_tokens", [NUM_TOKENS - 1, NUM_TOKENS + 1])
def test_a_buffer_of_another_size_is_refused(num_tokens: int) -> None:
    token_index = torch.from_numpy(rows_of(LENGTHS, PADDED_LENGTH).token_index)
    with pytest.raises(AssertionError):
        pack(make_taps(4)[0], token_index, torch.empty(num_tokens, 4), torch.zeros((), dtype=torch.int64))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("hidden_size", [4, 24, 1030])
def test_the_kernel_gives_the_bits_of_the_torch_path(hidden_size: int, split: bool) -> None:
    """In float32: the interpreter cuts bfloat16 off instead of rounding it."""
    taps = make_taps(hidden_size)
    expected, total = pack_all(taps, torch.float32, split=split)
    buffer = torch.full_like(expected, torch.inf, device=DEVICE)
    checksum_of_kernel = torch.zeros((), dtype=torch.int64, device=DEVICE)
    token_index = torch.from_numpy(rows_of(LENGTHS, PADDED_LENGTH).token_index).to(DEVICE)
    for tap, packed in zip(taps, buffer if split else buffer.transpose(0, 1), strict=True):
        pack_kernel.pack(tap.to(DEVICE), token_index, packed, checksum_of_kernel)
    assert torch.equal(buffer.cpu(), expected)
    assert int(checksum_of_kernel) == total
