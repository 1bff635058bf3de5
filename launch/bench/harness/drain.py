"""A drafter that takes every batch and looks at none: what targets can deliver when nobody holds them up."""

import os
import threading
import time
from pathlib import Path
from typing import NamedTuple

from common.actor.channel import Channel, ChannelClosedError
from common.actor.lifecycle import start_time
from common.actor.messages import PROTOCOL_VERSION, Finished, Grant, Hello, Incarnation, Next, Release
from common.run_dir import exchange_address


class Taken(NamedTuple):
    """A batch that arrived."""

    batch: int
    time_s: float  # CLOCK_MONOTONIC


class Drain:
    """The only drafter of a run, as a thread of this process: asks, releases, asks for the next."""

    def __init__(self, run_dir: Path) -> None:
        identity = Incarnation("drafter", 0, os.getpid(), start_time(os.getpid()))
        self.taken: list[Taken] = []
        self._channel = Channel(exchange_address(run_dir), identity)
        self._thread = threading.Thread(target=self._run, name="drain", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take no more."""
        self._channel.close()
        self._thread.join()

    def _run(self) -> None:
        batch = 0
        try:
            self._channel.ask(Hello(PROTOCOL_VERSION), lambda: True)
            while not isinstance(reply := self._channel.ask(Next(batch), lambda: True), Finished):
                if isinstance(reply, Grant):
                    self.taken.append(Taken(batch, time.monotonic()))
                    self._channel.ask(Release(reply.slot, reply.generation, intact=True), lambda: True)
                batch += 1
        except ChannelClosedError:
            return
