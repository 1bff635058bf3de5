"""Packing: the real rows of right-padded taps, back to back in one buffer.

B rows, S padded length, T real tokens of all rows, K taps, H hidden size.
"""

from collections.abc import Sequence

import torch


def pack(taps: Sequence[torch.Tensor], lengths: Sequence[int], out: torch.Tensor, *, split: bool) -> None:
    """Copy the first `lengths[b]` tokens of every row b of every tap into `out`, in its dtype.

    Both layouts hold the same features bit for bit. The places come from `lengths` on the CPU, so that
    nothing waits for the device; the copies run on the current stream, which must be the forward's.

    Args:
        taps: K tensors [B, S, H].
        lengths: B numbers of real tokens, T in all.
        out: [K, T, H] when `split`, else [T, K, H].
    """
    by_tap = out if split else out.transpose(0, 1)
    assert by_tap.shape == (len(taps), sum(lengths), taps[0].shape[-1])
    for tap, packed in zip(taps, by_tap, strict=True):
        for row, place in zip(tap, packed.split(list(lengths)), strict=True):
            place.copy_(row[: len(place)])
