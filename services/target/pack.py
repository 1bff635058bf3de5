"""Packing: the real tokens of a right-padded tap, back to back in the place where the slot will have them.

B rows, S padded length, T real tokens of all rows, K taps, H hidden size.
"""

import torch

from common.ring.checksum import checksum as checksum_of


def pack(tap: torch.Tensor, places: torch.Tensor, packed: torch.Tensor, checksum: torch.Tensor) -> None:
    """Copy the real tokens of one tap and add up their bits, on the current stream, which must be the forward's.

    Nothing waits for the device. A tap is packed as soon as the forward has made it, one kernel each, so that none is kept:
    of K taps in one kernel all but the last would wait in memory for it.

    Args:
        tap: [B, S, H], contiguous.
        places: int32 [T], the number of each real token among the B * S.
        packed: [T, H], a window onto the staging buffer, in the type of the slot.
        checksum: int64 [], to which what `common.ring.checksum` makes of `packed` is added.
    """
    assert packed.shape == (len(places), tap.shape[-1])
    if tap.is_cuda:
        from services.target import pack_kernel  # its import decides between a GPU and Triton's interpreter

        pack_kernel.pack(tap, places, packed, checksum)
        return
    packed.copy_(tap.flatten(0, 1)[places])
    checksum += checksum_of(packed)
