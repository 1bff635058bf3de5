"""Every message of the system: msgpack on the wire, typed here, one union per direction.

An actor asks, the exchange answers. Every request may be sent again until it is answered and has
the same effect however often it arrives. An answer to Work or Next may take as long as it takes.

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
    """One life of an actor."""

    role: str
    index: int
    pid: Word
    start_time: Word  # clock ticks since boot, field 22 of /proc/PID/stat

    @property
    def place(self) -> tuple[str, int]:
        """What all lives of the actor have in common."""
        return self.role, self.index


class Held(msgspec.Struct, frozen=True):
    """A slot that a target was leased and whose SlotReady has not been answered yet."""

    slot: int
    generation: int


class BatchInfo(msgspec.Struct, frozen=True):
    """What the plan says of a batch."""

    batch: int  # number in the run's one sequence
    kind: BatchKind
    epoch: int
    step: int  # optimizer steps before this batch
    closes: bool  # the last group of a step or of an evaluation


class Hello(msgspec.Struct, frozen=True, tag=True):
    """First words of an incarnation: what it held in its former life is reclaimed."""

    protocol: int


class Work(msgspec.Struct, frozen=True, tag=True):
    """A target asks for a slot to fill."""

    held: list[Held]


class SlotReady(msgspec.Struct, frozen=True, tag=True):
    """A target has filled a slot."""

    slot: int
    generation: int


class Next(msgspec.Struct, frozen=True, tag=True):
    """A drafter asks for a batch; it has no more need of its earlier ones."""

    batch: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """A drafter has copied a slot out; `intact` is false where the checksum was wrong."""

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
    lacked: Literal["slot", "work"] = "work"  # what the target waited for, if it had to wait


class Grant(msgspec.Struct, frozen=True, tag=True):
    """A slot to copy out."""

    slot: int
    generation: int
    info: BatchInfo


class NoBatch(msgspec.Struct, frozen=True, tag=True):
    """The place is padding: the rank takes part in the step with nothing of its own."""

    info: BatchInfo


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The sequence has no such batch: it is over."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is so, whether by this request or by an earlier copy of it."""


class Stale(msgspec.Struct, frozen=True, tag=True):
    """The right to that slot is gone; the request changed nothing."""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The request cannot be answered."""

    reason: str


RequestBody = Hello | Work | SlotReady | Next | Release | ActorDied
ReplyBody = Welcome | Lease | Grant | NoBatch | Finished | Done | Stale | Refused


class Request(msgspec.Struct, frozen=True):
    """What travels to the exchange; `id` rises within an incarnation."""

    id: int
    sender: Incarnation
    body: RequestBody


class Reply(msgspec.Struct, frozen=True):
    """What travels back; `id` is the request's."""

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
