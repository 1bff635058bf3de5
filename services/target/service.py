"""A target as a process: asks for work, runs the frozen model, fills a slot of its own ring."""

import logging
import time
from pathlib import Path

import torch

from common.board import Phase
from common.dataset import Dataset
from common.errors import ProtocolError
from common.layout import SlotLayout
from common.lifecycle import Actor, StoppedError
from common.messages import Lease, Work
from common.ring import RingWriter
from services.target.model import TargetModel
from services.target.publisher import Publisher
from services.target.rows import read_rows

log = logging.getLogger(__name__)


class TargetService:
    """The loop of a target; the river's first half."""

    def __init__(self, actor: Actor) -> None:
        config = actor.config
        torch.set_num_threads(config.targets.num_threads)
        self._actor = actor
        self._device = torch.device(config.targets.devices[actor.index])
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        paths = {"train": config.data.path, "eval": config.data.eval_path}
        damaged = config.data.skip_damaged
        self._datasets = {kind: Dataset.open(Path(path), damaged=damaged) for kind, path in paths.items() if path}
        writer = RingWriter(actor.args.ring_fd, SlotLayout.of(config), config.ring.num_slots)
        began = time.monotonic()
        self._model = TargetModel.load(config, self._device)
        log.info("model loaded in %.1f s", time.monotonic() - began)
        welcome = actor.join()
        self._publisher = Publisher(actor, writer, config.ring.num_slots, self._device, welcome.plan_hash)

    def run(self) -> None:
        """Work until told to stop, which ends it by StoppedError; a target never knows when the run is over."""
        self._actor.notices.phase(Phase.READY)
        while not self._actor.stopping:
            began = time.monotonic()
            lease = self._next_lease()
            leased = time.monotonic()
            rows = read_rows(self._datasets[lease.info.kind], lease.sample_ids)
            taps = self._model.forward(rows.input_ids.to(self._device, non_blocking=True))
            computed = time.monotonic()
            self._publisher.send(lease, rows, taps)
            self._actor.notices.add(num_batches=1, num_tokens=len(rows.packed.input_ids))
            self._actor.metrics.write(
                batch=lease.info.batch,
                num_tokens=len(rows.packed.input_ids),
                waiting_for_work_s=leased - began,
                forward_s=computed - leased,
                publish_s=time.monotonic() - computed,
            )

        raise StoppedError

    def _next_lease(self) -> Lease:
        """Waits for a free slot of the ring, or for a batch that is still needed."""
        reply = self._actor.ask(Work(self._publisher.held()), self._publisher.idle_since)
        if not isinstance(reply, Lease):
            raise ProtocolError(f"Work: needed Lease, found {reply}")
        return reply


def main(actor: Actor) -> None:
    """The body of `python -m services.target`."""
    TargetService(actor).run()
