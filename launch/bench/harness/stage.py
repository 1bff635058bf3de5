"""A run directory with its shared memory and without a supervisor, for measurements that start single actors."""

import signal
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from common import config as configuration
from common.actor.board import Board, Phase
from common.config import Config
from launch.data.synthetic import write_synthetic
from launch.operate.child import Child, wait_for_exit
from launch.operate.log_file import last_lines
from launch.operate.topology import create_memory, plan_topology

_TICK_S = 0.1


class Stage(AbstractContextManager["Stage"]):
    """The memory of one run, and those of its actors that were started here; gone at the end of the `with` block.

    Synthetic data of the configuration are written into the run directory, a temporary one that has `name` in its own.
    """

    def __init__(self, config: Config, name: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix=f"headrace-{name}-")
        self.run_dir = Path(self._folder.name)
        self.config = config if config.data.synthetic is None else self._with_data(config)
        configuration.write(self.config, self.run_dir)
        self.topology = plan_topology(config)
        self.fds = create_memory(self.topology)
        self.board = Board(self.fds.board, len(self.topology.actors))
        self._children: list[Child] = []

    def __exit__(self, *_: object) -> None:
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
        """Return when all of them are at work; RuntimeError if one ended before."""
        while any(self.board.read(child.spec.record).phase != Phase.READY for child in children):
            self.check()
            time.sleep(_TICK_S)

    def check(self) -> None:
        """Raise RuntimeError, with the end of its log, for an actor that ended although nobody stopped it."""
        for child in self._children:
            if exit_ := child.take_exit():
                tail = "\n".join(last_lines(child.log, 12))
                raise RuntimeError(f"{child.spec.name} ended with {exit_}:\n{tail}")

    def _with_data(self, config: Config) -> Config:
        write_synthetic(config, self.run_dir / "data")
        paths = {"path": str(self.run_dir / "data" / "train"), "eval_path": ""}
        return msgspec.structs.replace(config, data=msgspec.structs.replace(config.data, **paths))
