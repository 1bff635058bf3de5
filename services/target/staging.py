"""Buffers of one batch on the devices beside the forward's own memory, allocated once and reused.

B rows, S padded length, T real tokens of all rows, K taps, H hidden size.
"""

from collections.abc import Sequence

import msgspec
import torch

from common.device.copy_stream import Mark
from common.device.hidden_buffer import HiddenBuffer
from common.device.stopwatch import Stopwatch
from common.ring.layout import SlotLayout
from common.ring.ring import WritableSlot
from services.target.pack import pack
from services.target.rows import TargetRows
from services.target.stages import Stage


class _Part:
    """The packed taps of one stage on its device."""

    def __init__(self, layout: SlotLayout, stage: Stage) -> None:
        self._stage = stage
        self.hidden = HiddenBuffer(msgspec.structs.replace(layout, num_taps=len(stage.taps)), stage.device)
        self._token_index = torch.empty(layout.capacity_tokens, dtype=torch.int32, device=stage.device)
        self._num_tokens = 0
        self.watch = Stopwatch(stage.device, stage.stream)
        self.copy_watch = self.watch

    def begin(self, token_index: torch.Tensor) -> None:
        """Begin a batch on the stage's stream; `token_index` is int32 [T] in pinned memory."""
        self.watch = Stopwatch(self._stage.device, self._stage.stream)
        self._num_tokens = len(token_index)
        self.hidden.device_checksum.zero_()
        self._token_index[: self._num_tokens].copy_(token_index, non_blocking=True)

    def keep(self, tap_index: int, tap: torch.Tensor) -> None:
        self.watch.lap("forward_s")
        packed = self.hidden.hidden_states(self._num_tokens)[:, tap_index - self._stage.taps.start]
        pack(tap, self._token_index[: self._num_tokens], packed, self.hidden.device_checksum)
        self.watch.lap("pack_s")

    def copy_to(self, hidden_states: torch.Tensor) -> Mark:
        """Copy to the stage's taps in a slot, contiguous memory, behind everything launched so far on the stage's stream."""
        with self._stage.copies.after(Mark(self._stage.stream)):
            self.copy_watch = Stopwatch(self._stage.device)
            hidden_states.copy_(self.hidden.as_in_slot(self._num_tokens), non_blocking=True)
            self.hidden.checksum.copy_(self.hidden.device_checksum, non_blocking=True)
            self.copy_watch.lap("copy_s")
        return self._stage.copies.mark()


class Staging:
    """The inputs of a batch and its packed taps. Used again only after the marks of `copy_to`: nothing else protects it.

        staging.upload(rows) -> forward, which calls staging.keep for every tap and staging.enter for every further stage
                             -> staging.copy_to(slot) -> marks

    All of it is launched without waiting for a device, and allocates nothing.
    """

    def __init__(self, layout: SlotLayout, stages: Sequence[Stage]) -> None:
        capacity, device = layout.capacity_tokens, stages[0].device
        pinned = device.type == "cuda"
        self._tap_dimension = 0 if layout.split else 1
        self._stages = stages
        self._parts = [_Part(layout, stage) for stage in stages]
        self._part_of = [part for part, stage in zip(self._parts, stages, strict=True) for _ in stage.taps]
        self._host_ids = torch.empty(capacity, dtype=torch.int64, pin_memory=pinned)
        self._host_index = torch.empty(capacity, dtype=torch.int32, pin_memory=pinned)
        self._ids = torch.empty(capacity, dtype=torch.int64, device=device)
        self._num_tokens = 0

    def upload(self, rows: TargetRows) -> torch.Tensor:
        """Begin a batch; returns its token ids on the first device, int64 [B, S]."""
        self._num_tokens, count = len(rows.token_index), rows.input_ids.numel()
        self._host_index[: self._num_tokens].copy_(torch.from_numpy(rows.token_index))
        self._parts[0].begin(self._host_index[: self._num_tokens])
        self._host_ids[:count].copy_(rows.input_ids.view(-1))
        ids = self._ids[:count].copy_(self._host_ids[:count], non_blocking=True)  # only copies of pinned memory do not wait
        self._parts[0].watch.lap("upload_s")
        return ids.view(rows.input_ids.shape)

    def enter(self, stage_index: int) -> None:
        """End what is timed of the stage before, and begin the batch on this one."""
        self._parts[stage_index - 1].watch.lap("forward_s")
        self._parts[stage_index].begin(self._host_index[: self._num_tokens])
        self._parts[stage_index].watch.lap("upload_s")

    def keep(self, tap_index: int, tap: torch.Tensor) -> None:
        """Pack tap number `tap_index` [B, S, H] while the forward goes on."""
        self._part_of[tap_index].keep(tap_index, tap)

    def copy_to(self, slot: WritableSlot) -> list[Mark]:
        """Copy the packed taps to a slot behind everything launched so far; they are there when all marks are reached."""
        return [
            part.copy_to(slot.hidden_states.narrow(self._tap_dimension, stage.taps.start, len(stage.taps)))
            for part, stage in zip(self._parts, self._stages, strict=True)
        ]

    def checksum(self) -> int:
        """Return the checksum of the copied hidden states, a sum over the stages; valid once the marks are reached."""
        return sum(int(part.hidden.checksum) for part in self._parts)

    def watches(self) -> list[Stopwatch]:
        """Return the watch of each stage's stream for the batch begun last."""
        return [part.watch for part in self._parts]

    def laps_s(self) -> list[dict[str, float]]:
        """Return each device's seconds of upload, forward, pack and copy; valid once the marks are reached."""
        return [{"pack_s": 0.0} | part.watch.laps_s() | part.copy_watch.laps_s() for part in self._parts]

    def hidden_states(self) -> torch.Tensor:
        """Return [T, K, H] of a target on one device as packed so far, in either layout of the slot."""
        [part] = self._parts
        return part.hidden.hidden_states(self._num_tokens)
