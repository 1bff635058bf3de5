"""Random interleavings of targets, drafters and exchanges that lose, double and delay messages, and die."""

import random
from collections.abc import Callable

import pytest

from common.actor.messages import (
    ActorDied,
    Incarnation,
    Refused,
    Reply,
    Request,
)
from common.config import Config
from common.errors import ProtocolError
from tests.builders.simulated_peers import Memory, Peer, SimulatedDrafter, SimulatedTarget
from tests.builders.small_runs import make_config, make_incarnation, make_plan, make_router, make_table

NUM_SEEDS = 40


class World:
    """A run: its peers, its exchange, and a wire that keeps no order."""

    def __init__(self, config: Config, seed: int) -> None:
        self.config, self.rng = config, random.Random(seed)
        self.plan, self.memory = make_plan(config), Memory()
        self.table = make_table(config.num_targets * config.ring.num_slots)
        self.router = make_router(config, self.plan, self.table)
        self.to_exchange: list[Request] = []
        self.to_peers: list[tuple[bytes, Reply]] = []
        self.p_bad = 0.05
        self.num_incarnations = 1
        self.supervisor = Peer(make_incarnation("supervisor"))
        self.targets = [
            SimulatedTarget(make_incarnation("target", i), self.plan, self.memory) for i in range(config.num_targets)
        ]
        self.drafters = [self.new_drafter(rank, 1, 0) for rank in range(config.num_drafters)]

    def new_drafter(self, rank: int, number: int, first: int) -> SimulatedDrafter:
        who = make_incarnation("drafter", rank, number)
        return SimulatedDrafter(who, first, self.config.num_drafters, self.plan, self.memory, self.p_bad)

    def peers(self) -> list[Peer]:
        return [*self.targets, *self.drafters, self.supervisor]

    def turn(self, peer: Peer, p_lost: float) -> None:
        """Let a peer act and send its unanswered requests."""
        peer.act(self.rng)
        self.to_exchange += [request for request in peer.requests() if self.rng.random() >= p_lost]

    def serve_one(self, p_doubled: float) -> None:
        """Hand the exchange any message on the wire; a copy may stay there."""
        if not self.to_exchange:
            return
        index = self.rng.randrange(len(self.to_exchange))
        request = self.to_exchange[index] if self.rng.random() < p_doubled else self.to_exchange.pop(index)
        sender = request.sender
        address = f"{sender.role}-{sender.index}-{sender.start_time}".encode()
        try:
            self.to_peers += [(outgoing.address, outgoing.reply) for outgoing in self.router.handle(address, request)]
        except ProtocolError as error:
            self.to_peers.append((address, Reply(request.id, Refused(str(error)))))

    def deliver_one(self, p_lost: float) -> None:
        if not self.to_peers:
            return
        address, reply = self.to_peers.pop(self.rng.randrange(len(self.to_peers)))
        for peer in self.peers() if self.rng.random() >= p_lost else []:
            if address == f"{peer.who.role}-{peer.who.index}-{peer.who.start_time}".encode():
                peer.take(reply)
        for index, target in enumerate(self.targets):
            if target.refused:
                self.kill_target(index)

    def kill_target(self, index: int) -> None:
        dead = self.targets[index].who
        self.report_dead(dead)
        self.num_incarnations += 1
        self.targets[index] = SimulatedTarget(make_incarnation("target", index, self.num_incarnations), self.plan, self.memory)

    def kill_drafters(self) -> None:
        """Kill all drafters, as when one dies; they start again from a group that all of them had finished."""
        size = self.config.plan.batches_per_step
        group = self.rng.randint(0, min(drafter.batch for drafter in self.drafters) // size)
        self.num_incarnations += 1
        for rank, drafter in enumerate(self.drafters):
            self.report_dead(drafter.who)
            self.drafters[rank] = self.new_drafter(rank, self.num_incarnations, group * size)

    def report_dead(self, dead: Incarnation) -> None:
        self.memory.forget(dead)
        self.supervisor.ask(ActorDied(dead.pid, dead.start_time))

    def restart_exchange(self) -> None:
        """Replace the exchange: requests to the old one are lost with its connections, its answers may still arrive."""
        self.router = make_router(self.config, self.plan, self.table)
        self.to_exchange.clear()

    def trouble(self) -> None:
        """Cause one random event, mostly harmless."""
        happen: list[tuple[float, Callable[[], None]]] = [
            (30.0, lambda: self.turn(self.rng.choice(self.peers()), p_lost=0.2)),
            (30.0, lambda: self.serve_one(p_doubled=0.3)),
            (30.0, lambda: self.deliver_one(p_lost=0.2)),
            (0.4, lambda: self.kill_target(self.rng.randrange(len(self.targets)))),
            (0.3, self.kill_drafters),
            (0.3, self.restart_exchange),
        ]
        self.rng.choices([event for _, event in happen], [weight for weight, _ in happen])[0]()

    def settle(self) -> int:
        """Go on without further trouble until all drafters are at the end of the sequence."""
        for drafter in self.drafters:
            drafter.p_bad = 0.0
        for done in range(20 * self.plan.num_batches + 100):
            if all(drafter.finished for drafter in self.drafters):
                return done
            for peer in self.peers():
                self.turn(peer, p_lost=0.0)
            while self.to_exchange:
                self.serve_one(p_doubled=0.0)
            while self.to_peers:
                self.deliver_one(p_lost=0.0)
        raise AssertionError(f"no end: {[drafter.batch for drafter in self.drafters]} of {self.plan.num_batches}")


SHAPES = [(1, 1, 1, 1), (1, 2, 1, 2), (2, 1, 1, 2), (2, 2, 2, 2), (3, 2, 1, 4), (2, 3, 2, 3)]  # targets, drafters, slots, G


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_batch_reaches_its_rank_once_and_in_order_whatever_dies(shape: tuple[int, int, int, int]) -> None:
    num_targets, num_drafters, num_slots, batches_per_step = shape
    for seed in range(NUM_SEEDS):
        config = make_config(
            num_targets=num_targets,
            num_drafters=num_drafters,
            num_slots=num_slots,
            batches_per_step=batches_per_step,
            every_steps=2,
            seed=seed,
        )
        world = World(config, seed)
        for _ in range(world.rng.randrange(1200)):
            world.trouble()
        world.settle()
        for drafter in world.drafters:
            sequence = range(drafter.first, world.plan.num_batches, num_drafters)
            assert drafter.taken == [batch for batch in sequence if world.plan.sample_ids(batch)], f"seed {seed}"
