"""A run directory with its shared memory and without a supervisor: what measurements start single actors on."""

import signal
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from common import config as configuration
from common.actor.board import Board, Phase
from common.config import Config
from common.ring import memory
from common.ring.slot_table import SlotTable
from launch.data.synthetic import write_synthetic
from launch.operate.child import Child, wait_for_exit
from launch.operate.log_file import last_lines
from launch.operate.topology import SharedFds, plan_topology

_TICK_S = 0.1


class Stage:
    """The memory of one run, and those of its actors that were started here; gone at the end of the `with` block.

    Args:
        config: as loaded; its made-up data, if any, are written into the run directory.
        name: of the run directory, below the folder for temporary files.
    """

    def __init__(self, config: Config, name: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"headrace-{name}-")
        self.run_dir = Path(self._folder.name)
        self.config = self._with_data(config)
        configuration.write(self.config, self.run_dir)
        self.topology = plan_topology(config)
        rings = [memory.create(f"headrace-ring-{index}", self.topology.ring_bytes) for index in range(self.topology.num_rings)]
        control = memory.create("headrace-control", self.topology.table_bytes)
        self.fds = SharedFds(rings, control, memory.create("headrace-board", self.topology.board_bytes))
        self.board = Board(self.fds.board, len(self.topology.actors))
        self.table = SlotTable(control, config.num_targets * config.ring.num_slots)
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for child in self._children:
            child.send(signal.SIGKILL)
        while any(child.alive for child in self._children):
            wait_for_exit(self._children, _TICK_S)
            for child in self._children:
                child.take_exit()
        self._folder.cleanup()

    def start(self, role: str) -> list[Child]:
        """Start the actors of one role; they die with this process, and must be started by its main thread."""
        started = [Child(spec, self.run_dir) for spec in self.topology.actors if spec.role == role]
        self._children += started
        for child in started:
            child.start(self.fds)
        return started

    def await_ready(self, children: list[Child]) -> None:
        """Return when they are all at work.

        Raises:
            RuntimeError: one ended before; the end of its log is in the message.
        """
        while any(self.board.read(child.spec.record).phase != Phase.READY for child in children):
            self.check()
            time.sleep(_TICK_S)

    def check(self) -> None:
        """Raise RuntimeError where an actor ended that nobody stopped."""
        for child in self._children:
            if exit_ := child.take_exit():
                tail = "\n".join(last_lines(child.log, 12))
                raise RuntimeError(f"{child.spec.name} ended with {exit_}:\n{tail}")

    def _with_data(self, config: Config) -> Config:
        if config.data.synthetic is None:
            return config
        write_synthetic(config, self.run_dir / "data")
        paths = {"path": str(self.run_dir / "data" / "train"), "eval_path": ""}
        return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, **paths))
