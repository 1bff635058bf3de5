"""Targets and drafters as small state machines, each request sent again at every turn until answered."""

import random
from typing import NamedTuple

from common.actor.messages import (
    PROTOCOL_VERSION,
    ActorDied,
    Done,
    Finished,
    Grant,
    Held,
    Hello,
    Incarnation,
    Lease,
    Next,
    NoBatch,
    Refused,
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
from services.exchange.plan import Plan

MAX_UNANNOUNCED = 2


class Content(NamedTuple):
    generation: int
    batch: int


class Memory:
    """The content of the slots, and the live actor that uses each: two users of a slot are the error that must not be."""

    def __init__(self) -> None:
        self.contents: dict[int, Content] = {}
        self.users: dict[int, Incarnation] = {}

    def take(self, slot: int, user: Incarnation) -> None:
        assert slot not in self.users, f"slot {slot}: {user} beside {self.users[slot]}"
        self.users[slot] = user

    def leave(self, slot: int, user: Incarnation) -> None:
        assert self.users.pop(slot) == user

    def forget(self, dead: Incarnation) -> None:
        self.users = {slot: user for slot, user in self.users.items() if user != dead}


class Peer:
    """One incarnation of an actor, with its unanswered requests, which are sent again at every turn."""

    def __init__(self, who: Incarnation) -> None:
        self.who = who
        self.pending: dict[int, RequestBody] = {}
        self._last_id = 0

    def ask(self, body: RequestBody) -> None:
        self._last_id += 1
        self.pending[self._last_id] = body

    def requests(self) -> list[Request]:
        return [Request(number, self.who, body) for number, body in self.pending.items()]

    def take(self, reply: Reply) -> None:
        sent = self.pending.pop(reply.id, None)
        if sent is not None:
            self.answered(sent, reply.body)

    def answered(self, sent: RequestBody, body: ReplyBody) -> None:
        assert isinstance(sent, ActorDied) and isinstance(body, Done)

    def act(self, rng: random.Random) -> None:
        pass


class SimulatedTarget(Peer):
    """Asks for work, fills the slot a while later, announces it."""

    def __init__(self, who: Incarnation, plan: Plan, memory: Memory) -> None:
        super().__init__(who)
        self.plan, self.memory = plan, memory
        self.leases: list[Lease] = []  # not filled yet
        self.held: set[tuple[int, int]] = set()
        self.refused = False
        self.ask(Hello(PROTOCOL_VERSION))

    def answered(self, sent: RequestBody, body: ReplyBody) -> None:
        match body:
            case Lease(slot, generation, info, sample_ids):
                assert (info, sample_ids) == (self.plan.info(info.batch), self.plan.sample_ids(info.batch))
                self.memory.take(slot, self.who)
                self.leases.append(body)
                self.held.add((slot, generation))
            case Done() | Stale():
                assert isinstance(sent, SlotReady)  # Stale: its Done was lost and the slot has gone on
                self.held.remove((sent.slot, sent.generation))
            case Refused():
                self.refused = True
            case _:
                assert isinstance(body, Welcome)

    def act(self, rng: random.Random) -> None:
        if any(isinstance(body, Hello) for body in self.pending.values()):
            return
        if self.leases and rng.random() < 0.5:
            lease = self.leases.pop(0)
            self.memory.contents[lease.slot] = Content(lease.generation, lease.info.batch)
            self.memory.leave(lease.slot, self.who)
            self.ask(SlotReady(lease.slot, lease.generation))
        asks = any(isinstance(body, Work) for body in self.pending.values())
        if not asks and len(self.held) < MAX_UNANNOUNCED:
            self.ask(Work([Held(*lease) for lease in sorted(self.held)]))


class SimulatedDrafter(Peer):
    """Takes its batches in order from `first` on; now and then finds a wrong checksum."""

    def __init__(self, who: Incarnation, first: int, stride: int, plan: Plan, memory: Memory, p_bad: float) -> None:
        super().__init__(who)
        self.batch, self.stride, self.plan, self.memory, self.p_bad = first + who.index, stride, plan, memory, p_bad
        self.first = self.batch
        self.copying: Grant | None = None
        self.finished = False
        self.taken: list[int] = []
        self.ask(Hello(PROTOCOL_VERSION))

    def answered(self, sent: RequestBody, body: ReplyBody) -> None:
        match body:
            case Stale() if isinstance(sent, Release):  # its Done was lost and the slot has gone on
                self.ask(Next(self.batch))
            case Welcome() | Done():
                self.ask(Next(self.batch))
            case Grant(slot, generation, info):
                assert info == self.plan.info(self.batch)
                assert self.memory.contents[slot] == Content(generation, self.batch)
                self.memory.take(slot, self.who)
                self.copying = body
            case NoBatch(info):
                assert info == self.plan.info(self.batch) and not self.plan.sample_ids(self.batch)
                self.batch += self.stride
                self.ask(Next(self.batch))
            case Finished():
                assert self.batch >= self.plan.num_batches
                self.finished = True
            case _:
                raise AssertionError(f"{sent}: {body}")

    def act(self, rng: random.Random) -> None:
        if self.copying is None or rng.random() < 0.5:
            return
        slot, generation = self.copying.slot, self.copying.generation
        assert self.memory.contents[slot] == Content(generation, self.batch), "changed under the reader"
        intact = rng.random() >= self.p_bad
        if intact:
            self.taken.append(self.batch)
            self.batch += self.stride
        self.memory.leave(slot, self.who)
        self.copying = None
        self.ask(Release(slot, generation, intact))
