"""Every message between actors and exchange, one union per direction; common/wire.py is the codec.

An actor sends requests, the exchange replies. Every request may be sent again until a reply arrives, and has the
same effect however often it arrives. A reply to Work or Next may take any time.

    actor                    exchange
      Hello        ->          Welcome
      Work         ->          Lease          a target may fill this slot
      SlotReady    ->          Done | Stale
      Next         ->          Grant | NoBatch | Finished
      Release      ->          Done | Stale
      ActorDied    ->          Done           from the supervisor only
    anything else  ->          Refused
"""

from collections.abc import Callable
from typing import Annotated, Literal

import msgspec

from common import wire
from common.errors import ProtocolError

PROTOCOL_VERSION = 2
BatchKind = Literal["train", "eval"]
Word = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # fits the slot table


class Incarnation(msgspec.Struct, frozen=True):
    """One process of an actor, from start to end."""

    role: str
    index: int
    pid: Word
    start_time: Word  # clock ticks since boot, field 22 of /proc/PID/stat

    @property
    def actor(self) -> tuple[str, int]:
        """Role and index, which all incarnations of the actor share."""
        return self.role, self.index


class Held(msgspec.Struct, frozen=True):
    """A slot leased to a target whose SlotReady has no reply yet."""

    slot: int
    generation: int


class BatchInfo(msgspec.Struct, frozen=True):
    """The plan's record of a batch."""

    batch: int  # number in the run's one sequence
    kind: BatchKind
    epoch: int
    step: int  # optimizer steps before this batch
    closes: bool  # the last group of a step or of an evaluation


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First message of an incarnation: slots of the actor's earlier incarnations are reclaimed."""

    protocol: int


class Work(msgspec.Struct, frozen=True, tag=True):
    """A target requests a slot to fill."""

    held: list[Held]


class SlotReady(msgspec.Struct, frozen=True, tag=True):
    """A target has filled a slot."""

    slot: int
    generation: int


class Next(msgspec.Struct, frozen=True, tag=True):
    """A drafter requests a batch; it needs none of its earlier batches any more."""

    batch: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """A drafter has copied a slot out; `intact` is false if the checksum was wrong."""

    slot: int
    generation: int
    intact: bool


class ActorDied(msgspec.Struct, frozen=True, tag=True):
    """The kernel has reported the end of this process to the supervisor."""

    pid: int
    start_time: int


class BatchShape(msgspec.Struct, frozen=True):
    """Padded rows that a target computes at once."""

    num_rows: int
    length: int  # tokens
    num_batches: int = 0  # training batches of an epoch with so many rows in this bucket


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The identity and the length of the run, and the shapes that its targets prepare for."""

    plan_hash: bytes
    num_batches: int
    num_steps: int
    shapes: list[BatchShape] = []  # for every number of rows in a bucket, the longest


class Lease(msgspec.Struct, frozen=True, tag=True):
    """A slot to fill with a batch."""

    slot: int
    generation: int
    info: BatchInfo
    sample_ids: list[int]
    lacked: Literal["slot", "work"] = "work"  # the reason for the target's wait, if it had to wait


class Grant(msgspec.Struct, frozen=True, tag=True):
    """A slot to copy out."""

    slot: int
    generation: int
    info: BatchInfo


class NoBatch(msgspec.Struct, frozen=True, tag=True):
    """No batch for this rank in this step (the last step is padded); join the collective with zero gradients."""

    info: BatchInfo


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The sequence ends before this batch."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The request is applied, now or by an earlier copy of it."""


class Stale(msgspec.Struct, frozen=True, tag=True):
    """The sender no longer has the right to that slot; the request changed nothing."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request cannot be answered."""

    reason: str


RequestBody = Hello | Work | SlotReady | Next | Release | ActorDied
ReplyBody = Welcome | Lease | Grant | NoBatch | Finished | Done | Stale | Refused


class Request(msgspec.Struct, frozen=True):
    """A frame to the exchange; `id` rises within an incarnation."""

    id: int
    sender: Incarnation
    body: RequestBody


class Reply(msgspec.Struct, frozen=True):
    """A frame from the exchange; `id` is the request's."""

    id: int
    body: ReplyBody


class _Numbered(msgspec.Struct):
    id: int


decode_request: Callable[[bytes], Request] = wire.decoder(Request)
decode_reply: Callable[[bytes], Reply] = wire.decoder(Reply)
_decode_id: Callable[[bytes], _Numbered] = wire.decoder(_Numbered)


def find_id(data: bytes) -> int | None:
    """Return the id of a message that is wrong in other fields; None if it has none."""
    try:
        return _decode_id(data).id
    except ProtocolError:
        return None
