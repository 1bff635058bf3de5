"""A run that is told message by message what happens."""

from common.actor.messages import (
    Done,
    Grant,
    Held,
    Incarnation,
    Lease,
    Next,
    ReplyBody,
    Request,
    RequestBody,
    SlotReady,
    Work,
)
from common.config import Config
from common.ring.slot_table import SlotState
from tests.builders.small_runs import make_incarnation, make_plan, make_router, make_table

TARGET, DRAFTER, SUPERVISOR = make_incarnation("target"), make_incarnation("drafter"), make_incarnation("supervisor")
# One target, one drafter: batches 0 and 1 are held out, 2 to 7 are trained on, 8 and 9 are held out, none is padding.


class Run:
    """An exchange, and the ids that its actors count."""

    def __init__(self, config: Config) -> None:
        self.config, self.plan = config, make_plan(config)
        self.table = make_table(config.num_targets * config.ring.num_slots)
        self.last_id = 0
        self.restart()

    def restart(self) -> None:
        self.router = make_router(self.config, self.plan, self.table)

    def send(self, sender: Incarnation, body: RequestBody, request_id: int = 0) -> dict[int, ReplyBody]:
        """All replies that this sets free, by the id of their request."""
        self.last_id += 1
        replies = self.router.handle(b"address", Request(request_id or self.last_id, sender, body))
        assert all(outgoing.address == b"address" for outgoing in replies)
        assert len({outgoing.reply.id for outgoing in replies}) == len(replies)
        return {outgoing.reply.id: outgoing.reply.body for outgoing in replies}

    def ask(self, sender: Incarnation, body: RequestBody) -> ReplyBody | None:
        """The reply to this request, if it comes at once."""
        return self.send(sender, body).get(self.last_id)

    def lease(self, target: Incarnation = TARGET, held: tuple[Held, ...] = ()) -> Lease:
        lease = self.ask(target, Work(list(held)))
        assert isinstance(lease, Lease)
        return lease

    def fill(self, target: Incarnation = TARGET) -> Lease:
        lease = self.lease(target)
        assert self.ask(target, SlotReady(lease.slot, lease.generation)) == Done()
        return lease

    def grant(self, batch: int, drafter: Incarnation = DRAFTER) -> Grant:
        grant = self.ask(drafter, Next(batch))
        assert isinstance(grant, Grant) and grant.info.batch == batch
        return grant

    def states(self) -> list[str]:
        return [self.table.read(slot).state.name for slot in range(len(self.table))]

    def batches(self, state: SlotState) -> list[int]:
        records = [self.table.read(slot) for slot in range(len(self.table))]
        return [record.batch for record in records if record.state == state]
