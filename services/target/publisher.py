"""From the forward's taps to an announced slot, without holding up the next forward.

    main thread        pack into a staging buffer (forward's stream) -> copy to the slot (copy stream) -> mark
    publisher thread   wait for the mark -> seal the header -> SlotReady until answered

Staging buffers are made at start and used again only after their mark: nothing else protects them.
"""

import math
import threading
import time
from collections.abc import Sequence
from queue import Empty, Queue
from typing import NamedTuple

import torch

from common import faults
from common.checksum import checksum
from common.copy_stream import CopyStream, Mark, mark_computation
from common.hidden_buffer import HiddenBuffer
from common.layout import SlotHeader
from common.lifecycle import Actor
from common.messages import Held, Lease, SlotReady
from common.ring import RingWriter, WritableSlot
from services.target.pack import pack
from services.target.rows import TargetRows

_NUM_STAGINGS = 2
_WAIT_S = 0.1


class _Flight(NamedTuple):
    lease: Lease
    rows: TargetRows
    staging: HiddenBuffer
    slot: WritableSlot
    copied: Mark


class Publisher:
    """Packs, copies and announces; knows which leases are not answered for yet."""

    def __init__(self, actor: Actor, writer: RingWriter, slots_per_ring: int, device: torch.device, plan_hash: bytes) -> None:
        self._actor = actor
        self._writer = writer
        self._slots_per_ring = slots_per_ring
        self._device = device
        self._plan_hash = plan_hash
        self._copies = CopyStream(device)
        self._free: Queue[HiddenBuffer] = Queue()
        for _ in range(_NUM_STAGINGS):
            self._free.put(HiddenBuffer(writer.layout, device))
        self._flights: Queue[_Flight] = Queue()
        self._held: set[tuple[int, int]] = set()
        self._num_copying = 0  # sent, and not yet in their slots
        self._idle_since = 0.0
        self._lock = threading.Lock()
        actor.start_thread("publisher", self._announce)

    def held(self) -> list[Held]:
        """The leases that were granted and not yet announced for certain."""
        with self._lock:
            return [Held(slot, generation) for slot, generation in sorted(self._held)]

    def idle_since(self) -> float:
        """When the last batch that was sent had been computed and copied (CLOCK_MONOTONIC); inf while one has not."""
        with self._lock:
            return math.inf if self._num_copying else self._idle_since

    def send(self, lease: Lease, rows: TargetRows, taps: Sequence[torch.Tensor]) -> None:
        """Bring one batch on its way; waits only for a free staging buffer."""
        with self._lock:
            self._held.add((lease.slot, lease.generation))
            self._num_copying += 1
        num_tokens = len(rows.packed.input_ids)
        slot = self._writer.open(lease.slot % self._slots_per_ring, num_tokens, len(rows.packed.sample_ids))
        staging = self._take_staging()
        hidden_states = staging.as_in_slot(num_tokens)
        pack(taps, rows.lengths, hidden_states, split=self._writer.layout.split)
        staging.device_checksum.copy_(checksum(hidden_states))
        with self._copies.after(mark_computation(self._device)):
            slot.hidden_states.copy_(hidden_states, non_blocking=True)
            staging.checksum.copy_(staging.device_checksum, non_blocking=True)
        copied = self._copies.mark()
        faults.reach("target.mid_copy")
        for place, array in zip(slot.rows, rows.packed, strict=True):
            place[:] = array
        self._flights.put(_Flight(lease, rows, staging, slot, copied))

    def _take_staging(self) -> HiddenBuffer:
        """The device still works on what the buffers hold: no waiting for others."""
        while True:
            try:
                return self._free.get(timeout=_WAIT_S)
            except Empty:
                self._actor.keep_waiting()

    def _announce(self) -> None:
        while True:
            flight = self._flights.get()
            flight.copied.wait()
            with self._lock:
                self._num_copying -= 1
                self._idle_since = time.monotonic()
            flight.slot.seal(self._header_of(flight))
            self._free.put(flight.staging)
            lease = flight.lease
            faults.reach("target.before_slot_ready")
            self._actor.channel.ask(SlotReady(lease.slot, lease.generation), lambda: not self._actor.stopping)
            faults.reach("target.after_slot_ready")
            with self._lock:
                self._held.discard((lease.slot, lease.generation))

    def _header_of(self, flight: _Flight) -> SlotHeader:
        packed = flight.rows.packed
        return SlotHeader(
            plan_hash=self._plan_hash,
            generation=flight.lease.generation,
            batch=flight.lease.info.batch,
            num_tokens=len(packed.input_ids),
            num_samples=len(packed.sample_ids),
            hidden_checksum=int(flight.staging.checksum),
            rows_checksum=packed.checksum(),
        )
