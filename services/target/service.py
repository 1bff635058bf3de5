"""The target process: request work, run the frozen model, fill a slot of its own ring."""

import logging
import time
from pathlib import Path

import torch

from common.actor.board import Phase
from common.actor.lifecycle import Actor
from common.actor.messages import BatchKind, Lease, Work
from common.data.dataset import Dataset
from common.data.held_out import HeldOut
from common.device.memory import take_devices
from common.device.stopwatch import Stopwatch
from common.errors import ProtocolError
from common.ring.layout import SlotLayout
from common.ring.ring import RingWriter
from services.target.flops import ForwardFlops
from services.target.health import Health
from services.target.model import TargetModel
from services.target.publisher import Publisher
from services.target.rows import read_rows
from services.target.warmup import WarmUp

_HOST = torch.device("cpu")

log = logging.getLogger(__name__)


class TargetService:
    """The loop of a target: the first half of the pipeline, one call per stage."""

    def __init__(self, actor: Actor) -> None:
        config = actor.config
        torch.set_num_threads(config.targets.num_threads)
        self._actor = actor
        devices = take_devices(config.targets.devices[actor.index], "targets.devices")
        train = Dataset.open(Path(config.data.path))
        self._datasets: dict[BatchKind, Dataset | HeldOut] = {"train": train, "eval": HeldOut.open(config.data)}
        began = time.monotonic()
        self.model = TargetModel.load(config, *devices)
        log.info("model loaded in %.1f s", time.monotonic() - began)
        if config.targets.compile:
            self.model.compile_layers()

    def run(self) -> None:
        """Work until StoppedError is raised; a target is stopped from outside, also at the end of the run."""
        publisher = self.warm_up()
        self._actor.notices.phase(Phase.READY)
        while True:
            self._actor.check_stop()
            self.make_batch(publisher)

    def warm_up(self) -> Publisher:
        """Join the run, and make and tune everything before the first lease."""
        actor, config, layout = self._actor, self._actor.config, SlotLayout.of(self._actor.config)
        writer = RingWriter(actor.args.ring_fd, layout, config.ring.num_slots)
        welcome = actor.join()
        actor.notices.phase(Phase.WARMING_UP)
        stagings = WarmUp(self.model, layout, config.plan).run(welcome.shapes, actor.check_stop)
        health = Health(actor.metrics, ForwardFlops(self.model.decoder), [stage.device for stage in self.model.stages])
        return Publisher(actor, writer, stagings, health, welcome.plan_hash)

    def make_batch(self, publisher: Publisher) -> None:
        """Launch the forward of the next batch and its way to the ring."""
        clock = Stopwatch(_HOST)
        lease = self._next_lease(publisher)
        clock.lap(f"waiting_for_{lease.lacked}_s")
        rows = read_rows(self._datasets[lease.info.kind], lease.sample_ids, self._actor.config.plan.bucket_lengths)
        clock.lap("read_s")
        staging = publisher.take_staging(lease)
        clock.lap("waiting_for_staging_s")
        self.model.run(staging.upload(rows), staging.keep, staging.enter)
        clock.lap("launch_s")
        publisher.send(lease, rows, staging, clock.laps_s())
        self._actor.notices.add(num_batches=1, num_tokens=len(rows.token_index))

    def _next_lease(self, publisher: Publisher) -> Lease:
        """Wait for a free slot of the ring and a batch that is still needed."""
        reply = self._actor.ask(Work(publisher.held()), publisher.idle_since)
        if not isinstance(reply, Lease):
            raise ProtocolError(f"Work: needed Lease, found {reply}")
        return reply


def main(actor: Actor) -> None:
    TargetService(actor).run()
