"""Copy packed taps to slots and announce the slots, without delaying the next forward.

    main thread        forward and pack into a staging buffer (its stream) -> copy to the slot (copy stream) -> mark
    publisher thread   wait for the marks of all stages -> seal the header -> SlotReady until answered -> metrics

Staging buffers are made at start and used again only after their mark: nothing else protects them.
"""

import math
import threading
import time
from collections.abc import Sequence
from queue import Empty, Queue
from typing import NamedTuple

from common.actor import faults
from common.actor.lifecycle import Actor
from common.actor.messages import Held, Lease
from common.device.copy_stream import Mark
from common.ring.layout import SlotHeader
from common.ring.ring import RingWriter, WritableSlot
from services.target.health import Health
from services.target.rows import TargetRows
from services.target.staging import Staging

_WAIT_S = 0.1


class _Flight(NamedTuple):
    lease: Lease
    rows: TargetRows
    staging: Staging
    slot: WritableSlot
    copied: list[Mark]
    host_laps_s: dict[str, float]


class Publisher:
    """Copies the taps of a target to slots and announces the slots."""

    def __init__(
        self,
        actor: Actor,
        writer: RingWriter,
        stagings: Sequence[Staging],
        health: Health,
        plan_hash: bytes,
    ) -> None:
        self._actor = actor
        self._writer = writer
        self._health = health
        self._plan_hash = plan_hash
        self._free: Queue[Staging] = Queue()
        for staging in stagings:
            self._free.put(staging)
        self._flights: Queue[_Flight] = Queue()
        self._held: set[tuple[int, int]] = set()
        self._num_copying = 0  # batches sent whose copy is not finished
        self._idle_since = 0.0
        self._lock = threading.Lock()
        actor.start_thread("publisher", self._announce)

    def held(self) -> list[Held]:
        """Return the leases whose announcement has not been answered."""
        with self._lock:
            return [Held(slot, generation) for slot, generation in sorted(self._held)]

    def idle_since(self) -> float:
        """Return the time (CLOCK_MONOTONIC) at which the last sent batch was in its slot; inf while one is not."""
        with self._lock:
            return math.inf if self._num_copying else self._idle_since

    def take_staging(self, lease: Lease) -> Staging:
        """Return a free staging buffer for the batch of a lease; wait only for this device."""
        with self._lock:
            self._held.add((lease.slot, lease.generation))
        while True:
            try:
                return self._free.get(timeout=_WAIT_S)
            except Empty:
                self._actor.keep_waiting()

    def send(self, lease: Lease, rows: TargetRows, staging: Staging, host_laps_s: dict[str, float]) -> None:
        """Start the copy of a batch, whose forward is launched, to its slot; wait for nothing."""
        with self._lock:
            self._num_copying += 1
        slot = self._writer.open(lease.slot, len(rows.token_index), len(rows.packed.sample_ids))
        copied = staging.copy_to(slot)
        faults.reach("target.mid_copy")
        for view, array in zip(slot.rows, rows.packed, strict=True):
            view[:] = array
        self._flights.put(_Flight(lease, rows, staging, slot, copied, host_laps_s))

    def _announce(self) -> None:
        while True:
            flight = self._flights.get()
            for mark in flight.copied:
                mark.wait()
            copied_s = time.monotonic()
            with self._lock:
                self._num_copying -= 1
                self._idle_since = copied_s
            sealed = flight.slot.seal(self._header_of(flight))
            watches, laps_s = flight.staging.watches(), flight.staging.laps_s()
            self._free.put(flight.staging)
            lease = flight.lease
            faults.reach("target.before_slot_ready")
            self._actor.channel.ask(sealed.announcement(), lambda: not self._actor.stopping)
            faults.reach("target.after_slot_ready")
            with self._lock:
                self._held.discard((lease.slot, lease.generation))
            host_laps_s = flight.host_laps_s | {"publish_s": time.monotonic() - copied_s}
            self._health.record(lease.info.batch, flight.rows, copied_s, host_laps_s, watches, laps_s)

    def _header_of(self, flight: _Flight) -> SlotHeader:
        packed = flight.rows.packed
        return SlotHeader(
            plan_hash=self._plan_hash,
            generation=flight.lease.generation,
            batch=flight.lease.info.batch,
            num_tokens=len(packed.input_ids),
            num_samples=len(packed.sample_ids),
            hidden_checksum=flight.staging.checksum(),
            rows_checksum=packed.checksum(),
        )
