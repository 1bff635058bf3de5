"""A target's ring of slots as tensors: a writer that cannot read, a reader that cannot announce.

The exchange decides how long the bytes of a slot are valid, not a Python reference. Only the holder of the lease may
use the views that `open` returns.

    WritableSlot --seal(header)--> SealedSlot --announcement()--> SlotReady

T tokens, K taps, H hidden size, D documents.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.actor.messages import SlotReady
from common.errors import HeadraceError, SlotSizeError
from common.ring import memory
from common.ring.layout import SlotHeader, SlotLayout

_PORTABLE = 1  # cudaHostRegisterPortable: for every GPU of a target
_page_locked: list[torch.Tensor] = []  # never unmapped: a later mapping at the same addresses could not be registered


def page_lock(tensor: torch.Tensor) -> None:
    """Let the GPU copy to and from shared memory at full speed until the process ends; do nothing without CUDA.

    Populated pages are registered in 0.05 s per GiB, others in 0.45. torch's host allocator does not track
    this memory: the caller of an asynchronous copy owns the event that ends the copy.

    Raises:
        HeadraceError: the memory is registered already, or the driver refused.
    """
    if not torch.cuda.is_available() or tensor.nbytes == 0:
        return
    # Check first: a failed cudaHostRegister leaves a sticky error that the next, unrelated kernel launch reports.
    if tensor.is_pinned():
        raise HeadraceError(f"memory of {tensor.nbytes} bytes: needed to be registered once, found registered already")
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    error = int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, _PORTABLE))
    if error != 0:
        raise HeadraceError(f"cudaHostRegister of {tensor.nbytes} bytes: error {error}; is `ulimit -l` too small?")
    _page_locked.append(tensor)


class Rows(NamedTuple):
    """The documents of a batch, packed back to back, on the CPU."""

    input_ids: NDArray[np.integer]  # [T]
    loss_mask: NDArray[np.integer]  # [T], 0 or 1
    position_ids: NDArray[np.integer]  # [T], from 0 in each document
    cu_seqlens: NDArray[np.integer]  # [D + 1]
    sample_ids: NDArray[np.integer]  # [D]

    def checksum(self) -> int:
        """Sum all values. Arrays are weighted by their index, so swapping two of them changes the sum."""
        return sum(weight * int(array.sum(dtype=np.int64)) for weight, array in enumerate(self, start=1))


class _Ring:
    def __init__(self, fd: int, layout: SlotLayout, num_slots: int) -> None:
        mapping = memory.attach(fd, "ring memory", layout.ring_bytes(num_slots))
        self.layout = layout
        self._num_slots = num_slots
        self._bytes = memoryview(mapping)  # torch holds the memoryview, so the map outlives every tensor
        self._tensor = torch.frombuffer(self._bytes, dtype=torch.uint8)
        page_lock(self._tensor)

    def _check_size(self, num_tokens: int, num_samples: int) -> None:
        layout = self.layout
        if not (0 < num_tokens <= layout.capacity_tokens and 0 < num_samples <= layout.capacity_samples):
            raise SlotSizeError(
                f"slot: needed 1 to {layout.capacity_tokens} tokens and 1 to {layout.capacity_samples} samples, "
                f"found {num_tokens} and {num_samples}"
            )

    def _header(self, index: int) -> memoryview:
        return self._bytes[index * self.layout.stride :]

    def _hidden(self, index: int, num_tokens: int) -> torch.Tensor:
        start = index * self.layout.stride + memory.PAGE_BYTES
        flat = self._tensor[start : start + self.layout.hidden_bytes(num_tokens)]
        return flat.view(getattr(torch, self.layout.hidden_dtype)).view(self.layout.hidden_shape(num_tokens))

    def _rows(self, index: int, num_tokens: int, num_samples: int) -> Rows:
        counts = Rows(num_tokens, num_tokens, num_tokens, num_samples + 1, num_samples)._asdict()  # type: ignore[arg-type]
        views = {
            name: np.frombuffer(self._bytes, region.dtype, counts[name], index * self.layout.stride + region.offset)
            for name, region in self.layout.rows.items()
        }
        return Rows(**views)


class SealedSlot(NamedTuple):
    """A slot with its header written. Only a sealed slot can be announced."""

    number: int  # of the slot in the run
    generation: int

    def announcement(self) -> SlotReady:
        """Return the message that makes the slot readable."""
        return SlotReady(self.number, self.generation)


class WritableSlot(NamedTuple):
    """A slot while its target fills it."""

    number: int
    header: memoryview
    hidden_states: torch.Tensor  # [T, K, H] or [K, T, H], see SlotLayout
    rows: Rows

    def seal(self, header: SlotHeader) -> SealedSlot:
        """Write the header, after everything else is in the slot."""
        header.pack_into(self.header)
        return SealedSlot(self.number, header.generation)


class RingWriter(_Ring):
    """A target's own ring, to fill."""

    def open(self, number: int, num_tokens: int, num_samples: int) -> WritableSlot:
        """Return views of slot `number` of the run for a batch of that size; SlotSizeError if it is too large."""
        self._check_size(num_tokens, num_samples)
        index = number % self._num_slots
        hidden = self._hidden(index, num_tokens)
        return WritableSlot(number, self._header(index), hidden, self._rows(index, num_tokens, num_samples))


class ReadableSlot(NamedTuple):
    """A slot while a drafter copies it out."""

    header: SlotHeader
    hidden_states: torch.Tensor
    rows: Rows


class RingReader(_Ring):
    """A target's ring, to read."""

    def open(self, index: int) -> ReadableSlot:
        """Return views of slot `index` of the ring; SlotHeaderError or SlotSizeError if its header is not valid."""
        header = SlotHeader.unpack_from(self._header(index))
        self._check_size(header.num_tokens, header.num_samples)
        hidden = self._hidden(index, header.num_tokens)
        return ReadableSlot(header, hidden, self._rows(index, header.num_tokens, header.num_samples))
