"""A run of real processes without a model: an exchange, targets and drafters that any signal may end.

The hidden states of a batch are its number. A drafter's record is a file with one line per batch taken,
which also is its checkpoint: a new incarnation continues after the last line.
"""

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import NamedTuple, Self

import msgspec
import numpy as np

from common import config as configuration
from common.actor.board import Board, Phase, board_bytes
from common.actor.channel import Channel
from common.actor.lifecycle import start_time
from common.actor.messages import (
    PROTOCOL_VERSION,
    ActorDied,
    Finished,
    Grant,
    Hello,
    Incarnation,
    Lease,
    Next,
    Release,
    Welcome,
    Work,
)
from common.actor.messages import SlotReady as Ready
from common.config import Config
from common.data.dataset import Dataset
from common.ring import memory
from common.ring.checksum import checksum
from common.ring.layout import SlotHeader, SlotLayout
from common.ring.ring import RingReader, RingWriter, Rows
from common.ring.slot_table import table_bytes
from common.run_dir import exchange_address
from launch.data.writer import DatasetWriter
from tests.builders.small_runs import make_config
from tests.builders.warm_start import FORKS


class Inherited(NamedTuple):
    """A descriptor that a child gets a copy of, under a number of its own."""

    fd: int

    def __reduce__(self) -> tuple[type["_Arrived"], tuple[object]]:
        return _Arrived, (DupFd(self.fd),)


class _Arrived:
    def __new__(cls, sent: object) -> Inherited:  # type: ignore[misc]
        return Inherited(sent.detach())  # type: ignore[attr-defined]


def record_path(run_dir: Path, rank: int) -> Path:
    return run_dir / f"taken-{rank}"


def read_record(run_dir: Path, rank: int) -> list[tuple[int, int]]:
    """(batch, checksum of its hidden states) in the order of taking."""
    path = record_path(run_dir, rank)
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(batch), int(total)) for batch, total in map(str.split, lines)]


def _join(run_dir: Path, role: str, index: int) -> tuple[Channel, bytes]:
    channel = Channel(exchange_address(run_dir), Incarnation(role, index, os.getpid(), start_time(os.getpid())))
    welcome = channel.ask(Hello(PROTOCOL_VERSION), lambda: True)
    assert isinstance(welcome, Welcome)
    return channel, welcome.plan_hash


def run_target(run_dir: Path, index: int, rings: list[Inherited]) -> None:
    """Fill slots until killed, token by token, so that a kill finds slots half full."""
    config = configuration.read(run_dir)
    writer = RingWriter(rings[index].fd, SlotLayout.of(config), config.ring.num_slots)
    lengths = {"train": Dataset.open(Path(config.data.path)).lengths, "eval": Dataset.open(Path(config.data.eval_path)).lengths}
    channel, plan_hash = _join(run_dir, "target", index)
    while True:
        lease = channel.ask(Work([]), lambda: True)
        assert isinstance(lease, Lease)
        ends = np.cumsum([0, *lengths[lease.info.kind][lease.sample_ids].tolist()])
        num_tokens = int(ends[-1])
        slot = writer.open(lease.slot % config.ring.num_slots, num_tokens, len(lease.sample_ids))
        for token in range(num_tokens):
            slot.hidden_states[token] = lease.info.batch
            time.sleep(0.0005)
        number = np.full(num_tokens, lease.info.batch)
        rows = Rows(number, number % 2, number, ends, np.array(lease.sample_ids))
        for view, array in zip(slot.rows, rows, strict=True):
            view[:] = array
        sums = int(checksum(slot.hidden_states)), rows.checksum()
        slot.seal(SlotHeader(plan_hash, lease.generation, lease.info.batch, num_tokens, len(lease.sample_ids), *sums))
        channel.ask(Ready(lease.slot, lease.generation), lambda: True)


def run_drafter(run_dir: Path, rank: int, rings: list[Inherited]) -> None:
    """Take batches from behind the last line of the record to the end of the sequence."""
    config = configuration.read(run_dir)
    layout, slots = SlotLayout.of(config), config.ring.num_slots
    readers = [RingReader(ring.fd, layout, slots) for ring in rings]
    record = os.open(record_path(run_dir, rank), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)
    channel, plan_hash = _join(run_dir, "drafter", rank)
    taken = read_record(run_dir, rank)
    batch = taken[-1][0] + config.num_drafters if taken else rank
    while not isinstance(reply := channel.ask(Next(batch), lambda: True), Finished):
        if isinstance(reply, Grant):
            slot = readers[reply.slot // slots].open(reply.slot % slots)
            header = slot.header
            assert (header.plan_hash, header.generation, header.batch) == (plan_hash, reply.generation, batch)
            hidden_states = slot.hidden_states.clone()
            time.sleep(0.002)
            rows = Rows(*(np.array(array, np.int64) for array in slot.rows))
            assert (int(checksum(hidden_states)), rows.checksum()) == (header.hidden_checksum, header.rows_checksum)
            os.write(record, f"{batch} {header.hidden_checksum}\n".encode())
            channel.ask(Release(reply.slot, reply.generation, intact=True), lambda: True)
        batch += config.num_drafters
    channel.close()


ROLES = {"target": run_target, "drafter": run_drafter}


class ProcessRun:
    """The supervisor of such a run: its memory, its exchange, and its actors by role and index."""

    def __init__(self, run_dir: Path, num_samples: int, epochs: int) -> None:
        self.run_dir = run_dir
        self.config = self._prepare(num_samples, epochs)
        ring_bytes = SlotLayout.of(self.config).ring_bytes(self.config.ring.num_slots)
        self.rings = [Inherited(memory.create("test-ring", ring_bytes)) for _ in range(self.config.num_targets)]
        self.control_fd = memory.create("test-control", table_bytes(self.config.num_targets * self.config.ring.num_slots))
        self.board_fd = memory.create("test-board", board_bytes(1))
        self.board = Board(self.board_fd, 1)
        self.log = run_dir / "exchange.log"
        self.actors: dict[tuple[str, int], multiprocessing.context.ForkServerProcess] = {}
        self.channel = Channel(exchange_address(run_dir), Incarnation("supervisor", 0, os.getpid(), start_time(os.getpid())))
        self.exchange = self.start_exchange()

    def _prepare(self, num_samples: int, epochs: int) -> Config:
        config = make_config(num_targets=2, num_drafters=2, num_slots=2, batches_per_step=2, samples=2, epochs=epochs)
        for name, count in (("train", num_samples), ("eval", 3)):
            with DatasetWriter(self.run_dir / name, {}) as writer:
                for sample in range(count):
                    writer.add([sample] * (1 + sample % 8), [1] * (1 + sample % 8))
        data = msgspec.structs.replace(config.data, path=str(self.run_dir / "train"), eval_path=str(self.run_dir / "eval"))
        config = msgspec.structs.replace(config, data=data)
        configuration.write(config, self.run_dir)
        return config

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.channel.close()
        for actor in self.actors.values():
            actor.kill()
            actor.join()
        self.exchange.kill()
        self.exchange.wait()
        for fd in [self.control_fd, self.board_fd, *(ring.fd for ring in self.rings)]:
            os.close(fd)

    def start_exchange(self) -> "subprocess.Popen[bytes]":
        """Another exchange, whether or not there is one."""
        line = [sys.executable, "-m", "services.exchange", "--run-dir", str(self.run_dir), "--index", "0", "--record", "0"]
        line += ["--parent", str(os.getpid()), "--board-fd", str(self.board_fd), "--control-fd", str(self.control_fd)]
        with self.log.open("ab") as log:
            return subprocess.Popen(line, stderr=log, pass_fds=[self.board_fd, self.control_fd])

    def wait_until_ready(self) -> None:
        """Until the exchange that was started last serves."""
        while self.board.read(0)[:2] != (self.exchange.pid, Phase.READY):
            assert self.exchange.poll() is None, self.log.read_text()
            time.sleep(0.01)

    def wait_until_taken(self, num_batches: int) -> None:
        """Until the records of all drafters have that many lines in all."""
        deadline = time.monotonic() + 60  # a hung test ends; nothing is asserted of time
        while sum(len(read_record(self.run_dir, rank)) for rank in range(self.config.num_drafters)) < num_batches:
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.002)

    def start(self, role: str, index: int) -> None:
        """Start the next incarnation of an actor."""
        process = FORKS.Process(target=ROLES[role], args=(self.run_dir, index, self.rings), daemon=True)
        process.start()
        self.actors[role, index] = process

    def kill(self, role: str, index: int) -> None:
        """End an actor as `kill -9` does, report it once it is dead, start its next incarnation."""
        if role == "exchange":
            self.exchange.kill()
            self.exchange.wait()
            self.exchange = self.start_exchange()
            return
        actor = self.actors[role, index]
        assert actor.pid is not None
        born = start_time(actor.pid)
        os.kill(actor.pid, signal.SIGKILL)
        actor.join()
        self.channel.request(ActorDied(actor.pid, born))
        self.start(role, index)
