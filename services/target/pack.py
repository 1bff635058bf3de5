"""Packing: copy the real tokens of a right-padded tap back to back, in the order of the slot.

B rows, S padded length, T real tokens of all rows, K taps, H hidden size.
"""

import torch

from common.ring.checksum import checksum as checksum_of


def pack(tap: torch.Tensor, token_index: torch.Tensor, packed: torch.Tensor, checksum: torch.Tensor) -> None:
    """Copy the real tokens of one tap and add up their bits, on the current stream, which must be the forward's.

    Nothing waits for the device. Each tap is packed by its own kernel as soon as the forward has computed it; one kernel for
    all K taps would keep all but the last in memory until the end.

    Args:
        tap: [B, S, H], contiguous.
        token_index: int32 [T], of each real token in B * S.
        packed: [T, H], a view of the staging buffer, in the type of the slot.
        checksum: int64 []; the checksum of `packed` (`common.ring.checksum`) is added to it.
    """
    assert packed.shape == (len(token_index), tap.shape[-1])
    if tap.is_cuda:
        from services.target import pack_kernel  # its import decides between a GPU and Triton's interpreter

        pack_kernel.pack(tap, token_index, packed, checksum)
        return
    packed.copy_(tap.flatten(0, 1)[token_index])
    checksum += checksum_of(packed)
