"""Drafters without targets: an exchange whose every batch lies in a slot already.

The rows are those of the run's plan; the hidden states are random, made once, and the same in every batch.
"""

import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from common import wire
from common.actor import messages
from common.actor.messages import (
    ActorDied,
    Done,
    Finished,
    Grant,
    Hello,
    Incarnation,
    Next,
    NoBatch,
    Release,
    Reply,
    ReplyBody,
    Request,
    Welcome,
)
from common.data.dataset import Dataset
from common.ring.layout import SlotHeader, SlotLayout
from common.ring.ring import RingWriter
from common.run_dir import exchange_address
from launch.bench.harness.stage import Stage
from launch.operate.log_file import last_lines
from launch.operate.supervisor import Supervisor
from services.exchange.samples import read_run_data
from services.target.rows import read_rows

_POLL_MS = 20
_PATTERN_ELEMENTS = 1_000_003  # a prime, so that no two tokens are alike
_INTEGERS = {2: torch.int16, 4: torch.int32}


class Feed:
    """A thread that answers drafters; each rank has one slot of the first ring."""

    def __init__(self, stage: Stage) -> None:
        config = stage.config
        self._num_drafters = config.num_drafters
        self._bucket_lengths = config.plan.bucket_lengths
        self._layout = SlotLayout.of(config)
        self._dataset = Dataset.open(Path(config.data.path))
        self._plan, self._plan_hash = read_run_data(config.data).plan(config)
        self._ring = RingWriter(stage.fds.rings[0], self._layout, config.ring.num_slots)
        self._sums = self._fill()
        self._generation = 0
        self._latest: dict[Incarnation, tuple[int, ReplyBody]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(exchange_address(stage.run_dir),), name="feed", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answer no more."""
        self._closing.set()
        self._thread.join()

    def _fill(self) -> NDArray[np.int64]:
        """Random hidden states in the slot of every rank; returns the checksums of their first 0, 1, 2, ... tokens."""
        dtype = getattr(torch, self._layout.hidden_dtype)
        pattern = torch.randn(_PATTERN_ELEMENTS, generator=torch.Generator().manual_seed(0)).to(dtype)
        for rank in range(self._num_drafters):
            hidden = self._ring.open(rank, self._layout.capacity_tokens, 1).hidden_states.view(-1)
            for part in torch.split(hidden, _PATTERN_ELEMENTS):
                part.copy_(pattern[: len(part)])
        by_token = hidden.view(_INTEGERS[dtype.itemsize]).view(self._layout.capacity_tokens, -1)
        return np.cumsum([0, *by_token.sum(1, dtype=torch.int64).tolist()], dtype=np.int64)

    def _serve(self, address: str) -> None:
        with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(address)
            while not self._closing.is_set():
                if socket.poll(_POLL_MS):
                    peer, data = socket.recv_multipart()
                    request = messages.decode_request(data)
                    socket.send_multipart([peer, wire.encode(Reply(request.id, self._answer(request)))])

    def _answer(self, request: Request) -> ReplyBody:
        """A request that was sent again gets the same answer again, for the slot may be in use by now."""
        known = self._latest.get(request.sender)
        if known is None or known[0] != request.id:
            self._latest[request.sender] = request.id, self._new_answer(request)
        return self._latest[request.sender][1]

    def _new_answer(self, request: Request) -> ReplyBody:
        match request.body:
            case Hello():
                return self._welcome()
            case Next(batch):
                return self._grant(batch)
            case Release() | ActorDied():
                return Done()
            case other:
                raise AssertionError(f"no drafter asks for {other}")

    def _welcome(self) -> Welcome:
        plan = self._plan
        return Welcome(self._plan_hash, plan.num_batches, plan.num_steps, plan.shapes)

    def _grant(self, batch: int) -> ReplyBody:
        if batch >= self._plan.num_batches:
            return Finished()
        info, sample_ids = self._plan.info(batch), self._plan.sample_ids(batch)
        if not sample_ids:
            return NoBatch(info)
        self._generation += 1
        index, rows = batch % self._num_drafters, read_rows(self._dataset, sample_ids, self._bucket_lengths).packed
        num_tokens = len(rows.input_ids)
        slot = self._ring.open(index, num_tokens, len(sample_ids))
        for place, array in zip(slot.rows, rows, strict=True):
            place[:] = array
        sums = int(self._sums[num_tokens]), rows.checksum()
        slot.seal(SlotHeader(self._plan_hash, self._generation, batch, num_tokens, len(sample_ids), *sums))
        return Grant(index, self._generation, info)


def train(stage: Stage, until: Callable[[], bool]) -> bool:
    """Run the drafters of a stage under a supervisor of their own, on resident slots.

    Args:
        stage: its drafters run; no other actor does.
        until: asked several times a second; the run is ended at once when it says so.

    Returns:
        Whether the training came to its end before.

    Raises:
        RuntimeError: a drafter failed; the end of its log is in the message.
    """
    feed = Feed(stage)
    topology = stage.topology._replace(actors=[spec for spec in stage.topology.actors if spec.role == "drafter"])
    supervisor = Supervisor(stage.config, topology, stage.fds, stage.board, stage.run_dir)

    def on_tick() -> None:
        if until():
            supervisor.stop()

    try:
        is_done = supervisor.run(on_tick)
    finally:
        feed.close()
    if supervisor.culprit is not None:
        raise RuntimeError("\n".join([supervisor.failure, *last_lines(supervisor.culprit.log, 12)]))
    return is_done
