"""The messages between operator and supervisor: msgpack on the wire, one union per direction.

operator            supervisor
  GetStatus    ->     RunStatus
  Restart      ->     Accepted | Refused     end an actor in good order and start it again; no crash
  Kill         ->     Accepted | Refused     the same by SIGKILL
  Stop         ->     Accepted               as Ctrl-C: drafters save; a second one ends the run at once
anything else  ->     Refused
"""

from collections.abc import Callable
from typing import Literal

import msgspec

from common import wire

ActorState = Literal["starting", "warming up", "ready", "down", "done"]


class GetStatus(msgspec.Struct, frozen=True, tag=True):
    pass


class Restart(msgspec.Struct, frozen=True, tag=True):
    name: str  # of an actor


class Kill(msgspec.Struct, frozen=True, tag=True):
    name: str  # of an actor


class Stop(msgspec.Struct, frozen=True, tag=True):
    pass


class DeviceStatus(msgspec.Struct, frozen=True):
    """One device of an actor; of a target, as its last batch found it."""

    name: str
    busy: float | None = None  # share of the time between two batches
    reserved_bytes: int | None = None  # of a GPU, by the allocator of the actor


class ActorStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One actor, as the kernel and the board show it."""

    name: str
    state: ActorState
    pid: int | None
    uptime_s: float | None
    progress_age_s: float | None  # since it last said that it is alive
    restarts: int
    lost_s: float  # from its last progress until it was ready again, over all its deaths
    last_exit: str | None
    devices: list[DeviceStatus]


class RingStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The slots of one target, by state: free, writing, ready, reading."""

    target: str
    slots: list[str]


class RunStatus(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    run_dir: str
    state: Literal["running", "stopping"]
    uptime_s: float
    step: int
    num_steps: int | None
    num_skipped: int  # steps that were not finite
    loss: float | None
    acceptance: float | None  # length, exact and greedy, on held-out samples
    best_acceptance: float | None  # the highest among the checkpoints
    best_step: int | None
    best_unary: float | None  # its acceptance without the selector, of DFlash 2
    best_oracle: float | None  # with the best choice among the candidates
    target_tokens_per_s: float
    drafter_tokens_per_s: float
    verdict: str | None  # drafter bound, target bound, balanced
    targets_waiting: float | None  # share of the last half minute
    drafters_waiting: float | None
    time_left_s: float | None
    restarts: int
    actors: list[ActorStatus]
    rings: list[RingStatus]


class Accepted(msgspec.Struct, frozen=True, tag=True):
    what: str  # is under way


class Refused(msgspec.Struct, frozen=True, tag=True):
    reason: str  # why nothing was done


Request = GetStatus | Restart | Kill | Stop
Reply = RunStatus | Accepted | Refused

decode_request: Callable[[bytes], Request] = wire.decoder(Request)
decode_reply: Callable[[bytes], Reply] = wire.decoder(Reply)
