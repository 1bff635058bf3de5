"""Stand-ins for one side of a run, so that the other runs at its own speed: threads that talk to a real exchange.

Drain   a drafter that takes every batch and reads none of it
Feed    a target whose slots hold hidden states from the start; only the rows of a batch are written
"""

import itertools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from common.actor.channel import Channel, ChannelClosedError
from common.actor.lifecycle import start_time
from common.actor.messages import (
    PROTOCOL_VERSION,
    Finished,
    Grant,
    Hello,
    Incarnation,
    Lease,
    Next,
    Release,
    ReplyBody,
    RequestBody,
    Welcome,
    Work,
)
from common.data.dataset import Dataset
from common.ring.layout import SlotHeader, SlotLayout
from common.ring.ring import RingWriter
from common.run_dir import exchange_address
from launch.bench.harness.stage import Stage
from launch.operate.log_file import last_lines
from launch.operate.supervisor import Supervisor
from services.target.rows import read_rows

_PATTERN_ELEMENTS = 1_000_003  # a prime, so that no two tokens are alike
_INTEGERS = {2: torch.int16, 4: torch.int32}


class _Peer(ABC):
    """The only actor of its role in a run; `close` ends its thread."""

    def __init__(self, run_dir: Path, role: str) -> None:
        identity = Incarnation(role, 0, os.getpid(), start_time(os.getpid()))
        self._channel = Channel(exchange_address(run_dir), identity)
        self._thread = threading.Thread(target=self._run, name=role, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._channel.close()
        self._thread.join()

    def _run(self) -> None:
        with suppress(ChannelClosedError):
            welcome = self._ask(Hello(PROTOCOL_VERSION))
            assert isinstance(welcome, Welcome)
            self._work(welcome)

    def _ask(self, body: RequestBody) -> ReplyBody:
        return self._channel.ask(body, lambda: True)

    @abstractmethod
    def _work(self, welcome: Welcome) -> None: ...


class Taken(NamedTuple):
    """A batch that arrived."""

    batch: int
    time_s: float  # CLOCK_MONOTONIC


class Drain(_Peer):
    """A drafter that releases every batch at once."""

    def __init__(self, run_dir: Path) -> None:
        self.taken: list[Taken] = []
        super().__init__(run_dir, "drafter")

    def _work(self, welcome: Welcome) -> None:
        for batch in itertools.count():
            match self._ask(Next(batch)):
                case Finished():
                    return
                case Grant(slot, generation):
                    self.taken.append(Taken(batch, time.monotonic()))
                    self._ask(Release(slot, generation, intact=True))


class Feed(_Peer):
    """A target whose hidden states are random, made once, and the same in every batch."""

    def __init__(self, stage: Stage) -> None:
        config = stage.config
        self._layout = SlotLayout.of(config)
        self._ring = RingWriter(stage.fds.rings[0], self._layout, config.ring.num_slots)
        self._sums = self._fill(config.ring.num_slots)
        self._dataset = Dataset.open(Path(config.data.path))
        self._bucket_lengths = config.plan.bucket_lengths
        super().__init__(stage.run_dir, "target")

    def _fill(self, num_slots: int) -> NDArray[np.int64]:
        """Fill every slot with hidden states; return the checksums of their first 0, 1, 2, ... tokens."""
        dtype = getattr(torch, self._layout.hidden_dtype)
        pattern = torch.randn(_PATTERN_ELEMENTS, generator=torch.Generator().manual_seed(0)).to(dtype)
        for slot in range(num_slots):
            hidden = self._ring.open(slot, self._layout.capacity_tokens, 1).hidden_states.view(-1)
            for part in torch.split(hidden, _PATTERN_ELEMENTS):
                part.copy_(pattern[: len(part)])
        by_token = hidden.view(_INTEGERS[dtype.itemsize]).view(self._layout.capacity_tokens, -1)
        return np.cumsum([0, *by_token.sum(1, dtype=torch.int64).tolist()], dtype=np.int64)

    def _work(self, welcome: Welcome) -> None:
        while isinstance(lease := self._ask(Work([])), Lease):
            rows = read_rows(self._dataset, lease.sample_ids, self._bucket_lengths).packed
            num_tokens, num_samples = len(rows.input_ids), len(lease.sample_ids)
            slot = self._ring.open(lease.slot, num_tokens, num_samples)
            for view, array in zip(slot.rows, rows, strict=True):
                view[:] = array
            identity = welcome.plan_hash, lease.generation, lease.info.batch, num_tokens, num_samples
            header = SlotHeader(*identity, int(self._sums[num_tokens]), rows.checksum())
            self._ask(slot.seal(header).announcement())


def train(stage: Stage, until: Callable[[], bool]) -> None:
    """Run the exchange and the drafters of a stage under a supervisor of their own, fed by this process.

    `until` is called several times a second; the run is ended once it returns True.

    Raises:
        RuntimeError: an actor failed; the end of its log is in the message.
    """
    actors = [spec for spec in stage.topology.actors if spec.role != "target"]
    supervisor = Supervisor(stage.config, stage.topology._replace(actors=actors), stage.fds, stage.board, stage.run_dir)

    def on_tick() -> None:
        if until():
            supervisor.stop()

    with closing(Feed(stage)):
        supervisor.run(on_tick)
    if supervisor.culprit is not None:
        raise RuntimeError("\n".join([supervisor.failure, *last_lines(supervisor.culprit.log, 12)]))
