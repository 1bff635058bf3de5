"""A run directory and a board, and actors as real processes on them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common import config as configuration
from common.actor.board import Board, Phase, board_bytes
from common.ring import memory
from tests.builders.small_runs import make_config

WAIT_S = 30  # a hung test ends; nothing is asserted of time
HEAD = """
from common.actor.parent import die_with_parent
die_with_parent()
import os, sys, threading, time
from common import errors
from common.actor.board import Phase
from common.actor.lifecycle import StoppedError, run_actor
from common.actor.messages import Next

def ready(actor):
    actor.notices.phase(Phase.READY)

def main(actor):
"""
TAIL = """
run_actor("drafter", main, lambda parser: parser.add_argument("--extra"))
"""
SLEEP = "    ready(actor)\n    time.sleep(600)"


class Stage:
    """A run directory and a board, and the actors that are started on them."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        configuration.write(make_config(), run_dir)
        self.board_fd = memory.create("test-board", board_bytes(1))
        self.board = Board(self.board_fd, 1)
        self.log = run_dir / "log"
        self.started: list[subprocess.Popen[bytes]] = []

    def command(self, body: str, parent: str) -> list[str]:
        line = [sys.executable, "-c", HEAD + body + TAIL, "--run-dir", str(self.run_dir), "--index", "3", "--record", "0"]
        return [*line, "--board-fd", str(self.board_fd), "--parent", parent, "--extra", "word"]

    def start(self, body: str, parent: int | None = None) -> "subprocess.Popen[bytes]":
        return self.spawn(self.command(body, str(parent or os.getpid())))

    def spawn_parent_of(self, line: list[str]) -> "subprocess.Popen[bytes]":
        """A process that starts an actor, whose --parent is PARENT, and sleeps."""
        program = "import os, subprocess, sys, time\n"
        program += f"line = [str(os.getpid()) if word == 'PARENT' else word for word in {line!r}]\n"
        program += f"subprocess.Popen(line, pass_fds=[{self.board_fd}], start_new_session=True)\ntime.sleep(600)"
        return self.spawn([sys.executable, "-c", program])

    def spawn(self, command: list[str]) -> "subprocess.Popen[bytes]":
        with self.log.open("wb") as log:
            child = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[self.board_fd])
        self.started.append(child)
        return child

    def run(self, body: str) -> tuple[int, str]:
        """Exit code and log of a whole life."""
        code = self.start(body).wait(WAIT_S)
        return code, self.log.read_text()

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not holds():
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.01)

    def wait_until_ready(self) -> None:
        self.wait_until(lambda: self.board.read(0).phase == Phase.READY)
