"""Buffers of one batch on the device beside the forward's own memory, allocated once and reused.

B rows, S padded length, T real tokens of all rows, K taps, H hidden size.
"""

import torch

from common.device.copy_stream import CopyStream, Mark, mark_computation
from common.device.hidden_buffer import HiddenBuffer
from common.device.stopwatch import Stopwatch
from common.ring.layout import SlotLayout
from common.ring.ring import WritableSlot
from services.target.pack import pack
from services.target.rows import TargetRows


class Staging:
    """The inputs of a batch and its packed taps. Used again only after the mark of `copy_to`: nothing else protects it.

        staging.upload(rows) -> forward, which calls staging.keep for every tap -> staging.copy_to(slot, copies) -> mark

    All of it is launched without waiting for the device, and allocates nothing.
    """

    def __init__(self, layout: SlotLayout, device: torch.device) -> None:
        capacity, pinned = layout.capacity_tokens, device.type == "cuda"
        self._device = device
        self._hidden = HiddenBuffer(layout, device)
        self._host_ids = torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
        self._host_index = torch.empty(capacity, dtype=torch.int32, pin_memory=pinned)
        self._ids = torch.empty(capacity, dtype=torch.int64, device=device)
        self._token_index = torch.empty(capacity, dtype=torch.int32, device=device)
        self._num_tokens = 0
        self.watch = Stopwatch(device)  # of the forward's stream
        self._copy_watch = self.watch

    def upload(self, rows: TargetRows) -> torch.Tensor:
        """Begin a batch; returns its token ids on the device, int64 [B, S]."""
        self.watch = Stopwatch(self._device)
        self._num_tokens = len(rows.token_index)
        self._hidden.device_checksum.zero_()
        _upload(torch.from_numpy(rows.token_index), self._host_index, self._token_index)
        ids = _upload(rows.input_ids.view(-1), self._host_ids, self._ids)
        self.watch.lap("upload_s")
        return ids.view(rows.input_ids.shape)

    def keep(self, tap_index: int, tap: torch.Tensor) -> None:
        """Pack tap number `tap_index` [B, S, H] while the forward goes on."""
        self.watch.lap("forward_s")
        pack(tap, self._token_index[: self._num_tokens], self._by_tap()[tap_index], self._hidden.device_checksum)
        self.watch.lap("pack_s")

    def copy_to(self, slot: WritableSlot, copies: CopyStream) -> Mark:
        """Copy the packed taps to a slot behind everything launched so far; the mark is reached when they are there."""
        with copies.after(mark_computation(self._device)):
            self._copy_watch = Stopwatch(self._device)
            slot.hidden_states.copy_(self._hidden.as_in_slot(self._num_tokens), non_blocking=True)
            self._hidden.checksum.copy_(self._hidden.device_checksum, non_blocking=True)
            self._copy_watch.lap("copy_s")
        return copies.mark()

    def checksum(self) -> int:
        """Return the checksum of the copied hidden states; valid once the mark is reached."""
        return int(self._hidden.checksum)

    def laps_s(self) -> dict[str, float]:
        """Return the device's seconds of upload, forward, pack and copy; valid once the mark is reached."""
        return self.watch.laps_s() | self._copy_watch.laps_s()

    def hidden_states(self) -> torch.Tensor:
        """Return [T, K, H] as packed so far, in either layout of the slot."""
        return self._hidden.hidden_states(self._num_tokens)

    def _by_tap(self) -> torch.Tensor:
        """Return [K, T, H], a view of either layout."""
        return self.hidden_states().transpose(0, 1)


def _upload(values: torch.Tensor, host: torch.Tensor, device: torch.Tensor) -> torch.Tensor:
    """Copy through pinned memory: only copies from pinned memory do not wait."""
    count = len(values)
    host[:count].copy_(values)
    return device[:count].copy_(host[:count], non_blocking=True)
