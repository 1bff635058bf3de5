"""The decisions of the exchange: requests in, replies out, slot states in between. No sockets, no time.

Batches are produced in the order of the sequence and consumed by rank b % M, so order is never decided by timing.
Everything kept here beside the slot table can be rebuilt from the actors: the cursor of each drafter from its next Next,
the request of each target from its next Work.
"""

from typing import Literal, NamedTuple

from common.actor.messages import (
    PROTOCOL_VERSION,
    ActorDied,
    Done,
    Finished,
    Grant,
    Hello,
    Incarnation,
    Lease,
    Next,
    NoBatch,
    Release,
    Reply,
    ReplyBody,
    Request,
    RequestBody,
    SlotReady,
    Stale,
    Welcome,
    Work,
)
from common.errors import ProtocolError
from common.ring.slot_table import Owner, SlotState
from services.exchange.leases import Edge, Leases
from services.exchange.plan import Plan

MAX_BAD_SLOTS = 3
_SENDERS: dict[type[RequestBody], tuple[str, ...]] = {
    Hello: ("target", "drafter"),
    Work: ("target",),
    SlotReady: ("target",),
    Next: ("drafter",),
    Release: ("drafter",),
    ActorDied: ("supervisor",),
}


class Outgoing(NamedTuple):
    """A reply and the socket identity it goes to."""

    address: bytes
    reply: Reply


class _WaitingTarget(NamedTuple):
    address: bytes
    id: int
    owner: Owner
    held: set[tuple[int, int]]
    lacked: Literal["slot", "work"] = "work"


class _WaitingDrafter(NamedTuple):
    address: bytes
    id: int
    owner: Owner
    batch: int


class Router:
    """Answers each request from the plan, the slots and the requests that wait."""

    def __init__(self, plan: Plan, plan_hash: bytes, leases: Leases, num_drafters: int) -> None:
        self._plan = plan
        self._leases = leases
        self._num_drafters = num_drafters
        self._num_actors = {"target": leases.num_rings, "drafter": num_drafters, "supervisor": 1}
        self._welcome = Welcome(plan_hash, plan.num_batches, plan.num_steps, plan.shapes)
        self._current: dict[tuple[str, int], Incarnation] = {}
        self._cursors: dict[int, int] = {}  # rank -> the first batch that it still needs
        self._latest: dict[int, tuple[Incarnation, int]] = {}  # rank -> its latest request
        self._dead: set[Owner] = set()
        self._targets: dict[int, _WaitingTarget] = {}
        self._drafters: dict[int, _WaitingDrafter] = {}
        self._bad_slots: dict[int, int] = {}  # ring -> wrong checksums in a row
        self._outbox: list[Outgoing] = []

    def handle(self, address: bytes, request: Request) -> list[Outgoing]:
        """Return all replies that a request makes possible, to its sender and to others; ProtocolError if it has no answer."""
        self._outbox = []
        self._check_sender(request)
        answer = Stale() if self._is_replaced(request.sender) else self._answer(address, request)
        if answer is not None:
            self._send(address, request.id, answer)
        self._dispatch()
        return self._outbox

    def _answer(self, address: bytes, request: Request) -> ReplyBody | None:
        sender, owner = request.sender, _owner(request.sender)
        match request.body:
            case Hello(protocol):
                return self._greet(sender, protocol)
            case ActorDied(pid, start_time):
                self._reclaim(Owner(pid, start_time))
                return Done()
            case Work(held):
                held_slots = {(lease.slot, lease.generation) for lease in held}
                self._check_health(sender.index)
                self._targets[sender.index] = _WaitingTarget(address, request.id, owner, held_slots)
                return None
            case SlotReady(slot, generation):
                return self._publish(slot, generation, owner)
            case Next() | Release() if self._is_overtaken(sender, request.id):
                return Stale()
            case Next(batch):
                self._move_cursor(sender, batch)
                return self._wait_for(address, request.id, sender, batch)
            case Release(slot, generation, intact):
                return self._release(slot, generation, owner, intact)

    def _check_sender(self, request: Request) -> None:
        (role, index), name = request.sender.actor, type(request.body).__name__
        if role not in _SENDERS[type(request.body)]:
            raise ProtocolError(f"{name}: needed to come from {' or '.join(_SENDERS[type(request.body)])}, found {role!r}")
        if not 0 <= index < self._num_actors[role]:
            raise ProtocolError(f"{name}: needed a {role} from 0 to {self._num_actors[role] - 1}, found {index}")

    def _greet(self, sender: Incarnation, protocol: int) -> ReplyBody:
        if protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"Hello: needed protocol version {PROTOCOL_VERSION}, found {protocol}")
        if sender.role == "target":
            self._targets.pop(sender.index, None)
            self._bad_slots.pop(sender.index, None)
        else:
            self._drafters.pop(sender.index, None)
        self._reclaim_from_predecessors(sender)
        return self._welcome

    def _reclaim(self, owner: Owner) -> None:
        self._dead.add(owner)
        self._leases.reclaim(owner)
        self._targets = {ring: target for ring, target in self._targets.items() if target.owner != owner}
        self._drafters = {rank: drafter for rank, drafter in self._drafters.items() if drafter.owner != owner}

    def _reclaim_from_predecessors(self, sender: Incarnation) -> None:
        """Take back the slots of earlier incarnations.

        A successor starts only after the kernel has reported its predecessor's end, so Hello proves that end.
        """
        is_target = sender.role == "target"
        for slot, record in self._leases.in_state(SlotState.WRITING if is_target else SlotState.READING):
            index = self._leases.ring_of(slot) if is_target else record.batch % self._num_drafters
            if index == sender.index and record.owner != _owner(sender):
                self._leases.follow(slot, Edge.ABANDON if is_target else Edge.RETURN)

    def _is_replaced(self, sender: Incarnation) -> bool:
        """Return whether the sender is dead or has a successor.

        Messages of a dead process can still be queued after ActorDied, or behind messages of its successor.
        """
        key = sender.actor
        latest = max(self._current.get(key, sender), sender, key=lambda incarnation: (incarnation.start_time, incarnation.pid))
        self._current[key] = latest
        return latest != sender or _owner(sender) in self._dead

    def _is_overtaken(self, sender: Incarnation, request_id: int) -> bool:
        """Return whether a request is a late copy: a drafter sends one request after the other, with rising numbers."""
        latest_sender, latest_id = self._latest.get(sender.index, (sender, 0))
        if latest_sender == sender and request_id < latest_id:
            return True
        self._latest[sender.index] = (sender, request_id)
        return False

    def _check_health(self, ring: int) -> None:
        if self._bad_slots.get(ring, 0) >= MAX_BAD_SLOTS:
            raise ProtocolError(f"target-{ring}: {MAX_BAD_SLOTS} slots in a row arrived with a wrong checksum")

    def _publish(self, slot: int, generation: int, owner: Owner) -> ReplyBody:
        if self._leases.is_current(slot, generation, owner, SlotState.WRITING):
            self._leases.follow(slot, Edge.PUBLISH)
            return Done()
        return self._by_generation(slot, generation)

    def _release(self, slot: int, generation: int, owner: Owner, intact: bool) -> ReplyBody:
        if not self._leases.is_current(slot, generation, owner, SlotState.READING):
            return self._by_generation(slot, generation)
        batch = self._leases.follow(slot, Edge.RELEASE).batch
        ring = self._leases.ring_of(slot)
        if intact:
            self._cursors[batch % self._num_drafters] = batch + self._num_drafters
            self._bad_slots[ring] = 0
        else:
            self._bad_slots[ring] = self._bad_slots.get(ring, 0) + 1
        return Done()

    def _by_generation(self, slot: int, generation: int) -> ReplyBody:
        """Reply Done to a retry of a request that was already applied, Stale to anything else."""
        if not 0 <= slot < len(self._leases):
            raise ProtocolError(f"slot: needed 0 to {len(self._leases) - 1}, found {slot}")
        return Done() if self._leases.read(slot).generation == generation else Stale()

    def _move_cursor(self, sender: Incarnation, batch: int) -> None:
        rank = sender.index
        if batch < 0 or batch % self._num_drafters != rank:
            raise ProtocolError(f"Next: needed a batch b with b % {self._num_drafters} = {rank}, found {batch}")
        self._cursors[rank] = batch
        for slot, record in self._leases.in_state(SlotState.READING):
            if record.owner == _owner(sender) and record.batch != batch:  # granted for a late Next, or left before its Release
                self._leases.follow(slot, Edge.RELEASE if record.batch < batch else Edge.RETURN)

    def _wait_for(self, address: bytes, request_id: int, sender: Incarnation, batch: int) -> ReplyBody | None:
        if batch >= self._plan.num_batches:
            return Finished()
        if not self._plan.sample_ids(batch):
            return NoBatch(self._plan.info(batch))
        self._drafters[sender.index] = _WaitingDrafter(address, request_id, _owner(sender), batch)
        return None

    def _dispatch(self) -> None:
        """Evict batches that nobody needs, grant ready ones, lease free slots, make room for batches that a rank waits for."""
        for slot, record in self._leases.in_state(SlotState.READY):
            if record.batch < self._cursors.get(record.batch % self._num_drafters, 0):
                self._leases.follow(slot, Edge.EVICT)
        in_slots = self._leases.batches()
        for rank, drafter in sorted(self._drafters.items()):
            if drafter.batch in in_slots:
                self._grant(rank, drafter, in_slots[drafter.batch])
        for ring, target in list(self._targets.items()):  # in the order of their requests
            self._lease(ring, target)

    def _grant(self, rank: int, drafter: _WaitingDrafter, slot: int) -> None:
        record = self._leases.read(slot)
        if record.state == SlotState.READY:
            record = self._leases.grant(slot, drafter.owner)
        if record.state == SlotState.READING and record.owner == drafter.owner:
            del self._drafters[rank]
            self._send(drafter.address, drafter.id, Grant(slot, record.generation, self._plan.info(record.batch)))

    def _lease(self, ring: int, target: _WaitingTarget) -> None:
        unanswered = [
            (slot, record)
            for slot, record in self._leases.in_state(SlotState.WRITING, ring)
            if record.owner == target.owner and (slot, record.generation) not in target.held
        ]
        if unanswered:  # its Lease was lost on the way
            slot, record = unanswered[0]
        else:
            batch = self._next_batch()
            found = None if batch is None else self._room_in(ring, batch)
            if batch is None or found is None:
                self._targets[ring] = target._replace(lacked="work" if batch is None else "slot")
                return
            slot, record = found, self._leases.lease(found, batch, target.owner)
        del self._targets[ring]
        info, sample_ids = self._plan.info(record.batch), self._plan.sample_ids(record.batch)
        lease = Lease(slot, record.generation, info, sample_ids, target.lacked)
        self._send(target.address, target.id, lease)

    def _next_batch(self) -> int | None:
        """Return the earliest batch that some rank still needs and that is in no slot."""
        in_slots = self._leases.batches()
        missing = []
        for batch in self._cursors.values():
            while batch < self._plan.num_batches and (batch in in_slots or not self._plan.sample_ids(batch)):
                batch += self._num_drafters
            if batch < self._plan.num_batches:
                missing.append(batch)
        return min(missing, default=None)

    def _room_in(self, ring: int, batch: int) -> int | None:
        """Return a free slot of the ring; for a batch that a rank waits for, evict the latest READY batch after it.

        Without that eviction kills deadlock: full rings and a rank that waits for a batch in none of them.
        """
        free = self._leases.in_state(SlotState.FREE, ring)
        if free:
            return free[0][0]
        if all(drafter.batch != batch for drafter in self._drafters.values()):
            return None
        later = [(record.batch, slot) for slot, record in self._leases.in_state(SlotState.READY, ring) if record.batch >= batch]
        if not later:
            return None
        _, slot = max(later)
        self._leases.follow(slot, Edge.EVICT)
        return slot

    def _send(self, address: bytes, request_id: int, body: ReplyBody) -> None:
        self._outbox.append(Outgoing(address, Reply(request_id, body)))


def _owner(incarnation: Incarnation) -> Owner:
    return Owner(incarnation.pid, incarnation.start_time)
