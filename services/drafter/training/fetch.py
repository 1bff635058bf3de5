"""Batches from slots to device buffers, one ahead of the training.

    fetch thread   Next -> Grant -> copy into a free buffer -> wait for the copy -> check -> Release
    main thread    next() -> compute -> recycle()

A slot is held for the copy only. Buffers are made at start; one is filled again only after the mark that `recycle` set
behind the last kernel that reads it.
"""

import itertools
import logging
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, Queue
from typing import NamedTuple

import numpy as np
import torch

from common.actor import faults
from common.actor.channel import ChannelClosedError
from common.actor.lifecycle import Actor
from common.actor.messages import BatchInfo, Finished, Grant, Next, NoBatch, Release, ReplyBody
from common.device.copy_stream import CopyStream, Mark, mark_computation
from common.device.hidden_buffer import HiddenBuffer
from common.device.upload import upload
from common.errors import ProtocolError, SlotChecksumError, SlotError, StaleLeaseError
from common.ring.checksum import checksum
from common.ring.layout import SlotHeader
from common.ring.ring import RingReader, Rows
from services.drafter.model.batch import PackedBatch

_NUM_BUFFERS = 2
_WAIT_S = 0.1
_POLL_S = 0.02
log = logging.getLogger(__name__)


class _Buffer(NamedTuple):
    hidden: HiddenBuffer
    free: Mark


class _Copied(NamedTuple):
    buffer: HiddenBuffer
    rows: Rows


class Fetched(NamedTuple):
    """One batch of the sequence on the device; no batch for this rank where the last step is padded."""

    info: BatchInfo
    batch: PackedBatch | None
    buffer: HiddenBuffer | None


class Fetcher:
    """Fetches the batches of one rank, in order."""

    def __init__(self, actor: Actor, rings: list[RingReader], device: torch.device, plan_hash: bytes) -> None:
        self._actor = actor
        self._rings = rings
        self._slots_per_ring = actor.config.ring.num_slots
        self._device = device
        self._plan_hash = plan_hash
        self._copies = CopyStream(device)
        self._buffers = [HiddenBuffer(rings[0].layout, device) for _ in range(_NUM_BUFFERS)]
        self._free: Queue[_Buffer] = Queue()
        self._ready: Queue[tuple[BatchInfo, _Copied | None] | None] = Queue()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start(self, first_batch: int) -> None:
        """Fetch this rank's batches from `first_batch` on, a multiple of the number of ranks."""
        self._free, self._ready, self._stopping = Queue(), Queue(), False
        for buffer in self._buffers:
            self._free.put(_Buffer(buffer, mark_computation(self._device)))
        batches = itertools.count(first_batch + self._actor.index, self._actor.config.num_drafters)
        self._thread = self._actor.start_thread("fetch", lambda: self._fetch_all(batches))

    def stop(self) -> None:
        """Stop fetching; when it returns, no slot is being read. Batches fetched but not taken are dropped."""
        if self._thread is not None:
            self._stopping = True
            self._thread.join()
            self._thread = None

    def next(self, check: Callable[[], None]) -> Fetched | None:
        """Return the next batch of the sequence, or None at its end. `check` may end the wait by raising.

        The actor counts as waiting once the device has finished everything that was launched.
        """
        computed = mark_computation(self._device)
        with self._actor.waiting(lambda: 0.0 if computed.reached() else math.inf):
            item = self._wait(check)
        if item is None:
            return None
        info, copied = item
        return Fetched(info, None, None) if copied is None else Fetched(info, self._to_batch(copied), copied.buffer)

    def recycle(self, fetched: Fetched) -> None:
        """Free the buffer once the last kernel that reads it was launched."""
        if fetched.buffer is not None:
            self._free.put(_Buffer(fetched.buffer, mark_computation(self._device)))

    def _wait(self, check: Callable[[], None]) -> tuple[BatchInfo, _Copied | None] | None:
        while True:
            try:
                return self._ready.get(timeout=_POLL_S)
            except Empty:
                self._actor.keep_waiting()
                check()

    def _to_batch(self, copied: _Copied) -> PackedBatch:
        rows = copied.rows
        return PackedBatch(
            hidden_states=copied.buffer.hidden_states(len(rows.input_ids)),
            position_ids=upload(rows.position_ids, self._device),
            input_ids=rows.input_ids.astype(np.int64),
            loss_mask=rows.loss_mask.astype(np.bool_),
            cu_seqlens=rows.cu_seqlens.astype(np.int64),
            sample_ids=rows.sample_ids.astype(np.int64),
        )

    def _fetch_all(self, batches: "itertools.count[int]") -> None:
        for batch in batches:
            reply = self._fetch(batch)
            self._ready.put(reply)
            if reply is None:
                return

    def _fetch(self, batch: int) -> tuple[BatchInfo, _Copied | None] | None:
        buffer = self._take_buffer()
        while True:
            reply = self._ask(Next(batch))
            match reply:
                case Grant():
                    copied = self._copy(reply, buffer)
                    faults.reach("drafter.before_release")
                    self._ask(Release(reply.slot, reply.generation, copied is not None))
                    faults.reach("drafter.after_release")
                    if copied is not None:
                        return reply.info, copied
                case NoBatch(info):
                    self._free.put(buffer)
                    return info, None
                case Finished():
                    return None
                case _:
                    raise ProtocolError(f"Next: needed Grant, NoBatch or Finished, found {reply}")

    def _take_buffer(self) -> _Buffer:
        while not self._stopping:
            with suppress(Empty):
                return self._free.get(timeout=_WAIT_S)
        raise ChannelClosedError

    def _ask(self, body: Next | Release) -> ReplyBody:
        return self._actor.channel.ask(body, lambda: not self._stopping)

    def _copy(self, grant: Grant, buffer: _Buffer) -> _Copied | None:
        """Copy a slot out and check it; return None if it does not hold the granted batch as it was written."""
        try:
            return self._copy_checked(grant, buffer)
        except SlotError as error:
            log.warning("slot %d, batch %d: %s; it is produced again", grant.slot, grant.info.batch, error)
            self._actor.metrics.write(rejected_batch=grant.info.batch, reason=str(error))
            return None

    def _copy_checked(self, grant: Grant, buffer: _Buffer) -> _Copied:
        ring, index = divmod(grant.slot, self._slots_per_ring)
        slot = self._rings[ring].open(index)
        target = buffer.hidden.as_in_slot(slot.header.num_tokens)
        with self._copies.after(buffer.free):
            target.copy_(slot.hidden_states, non_blocking=True)
            buffer.hidden.device_checksum.copy_(checksum(target))
            buffer.hidden.checksum.copy_(buffer.hidden.device_checksum, non_blocking=True)
        copied = self._copies.mark()
        faults.reach("drafter.mid_fetch")
        rows = Rows(*(np.array(array, np.int64) for array in slot.rows))
        copied.wait()
        self._check(grant, slot.header, int(buffer.hidden.checksum), rows.checksum())
        return _Copied(buffer.hidden, rows)

    def _check(self, grant: Grant, header: SlotHeader, hidden_checksum: int, rows_checksum: int) -> None:
        """Check the lease before the content: a slot that was granted anew may hold anything."""
        lease = {
            "plan hash": (self._plan_hash, header.plan_hash),
            "generation": (grant.generation, header.generation),
            "batch": (grant.info.batch, header.batch),
        }
        content = {
            "hidden states checksum": (header.hidden_checksum, hidden_checksum),
            "rows checksum": (header.rows_checksum, rows_checksum),
        }
        for error, pairs in ((StaleLeaseError, lease), (SlotChecksumError, content)):
            lines = [f"{name}: needed {ours!r}, found {theirs!r}" for name, (ours, theirs) in pairs.items() if ours != theirs]
            if lines:
                raise error("; ".join(lines))
