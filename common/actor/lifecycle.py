"""The life of an actor process, from its command line to its exit code.

An actor dies with its supervisor (common/actor/parent.py), logs to its standard error (the supervisor points it at the log
file), ends its loop on SIGTERM, and dumps all stacks to its log on SIGUSR1.
"""

import argparse
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from common import config as configuration
from common.actor import faults
from common.actor.board import Board, Notices
from common.actor.channel import Channel, ChannelClosedError
from common.actor.messages import PROTOCOL_VERSION, Hello, Incarnation, ReplyBody, RequestBody, Welcome
from common.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    ProtocolError,
    RunDirectoryBusyError,
    TrainingDivergedError,
)
from common.metrics import MetricsWriter
from common.run_dir import actor_name, exchange_address

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_HOPELESS = 2  # a restart would fail in the same way
EXIT_STOPPED = 4  # told to stop before its work was done
_HOPELESS = (ConfigError, DataError, ModelError, CheckpointError, RunDirectoryBusyError, TrainingDivergedError)
_ALWAYS = float  # idle since 0.0

log = logging.getLogger(__name__)


class StoppedError(Exception):
    """The actor was told to stop and has left everything in order."""


def start_time(pid: int) -> int:
    """When a process started, in clock ticks since boot: field 22 of /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


class Actor:
    """What every actor has: its place in the run, its notice, its metrics, its way to the exchange."""

    def __init__(self, role: str, args: argparse.Namespace) -> None:
        self.args = args
        self.run_dir: Path = args.run_dir
        self.index: int = args.index
        self.name = actor_name(role, args.index)
        self.config = configuration.read(args.run_dir)
        self.incarnation = Incarnation(role, args.index, os.getpid(), start_time(os.getpid()))
        self.board = Board(args.board_fd, 1 + self.config.num_targets + self.config.num_drafters)
        self.notices = Notices(args.board_fd, args.record, os.getpid())
        self.metrics = MetricsWriter(args.run_dir, self.name)
        self.stopping = False
        self._channel: Channel | None = None
        self._thread_failure: BaseException | None = None
        self._last_report_s = time.monotonic()
        self._wait: tuple[float, Callable[[], float]] | None = None  # counted until, idle since

    def join(self) -> Welcome:
        """Open the way to the exchange and say Hello."""
        self._channel = Channel(exchange_address(self.run_dir), self.incarnation)
        welcome = self.ask(Hello(PROTOCOL_VERSION))
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"Hello: needed Welcome, found {welcome}")
        return welcome

    @property
    def channel(self) -> Channel:
        """The way to the exchange, for threads beside the main one."""
        assert self._channel is not None, "join() comes first"
        return self._channel

    def ask(self, body: RequestBody, idle_since: Callable[[], float] = _ALWAYS) -> ReplyBody:
        """Ask the exchange; the wait shows in the notice as in `waiting`, and ends by ChannelClosedError when told to stop."""
        with self.waiting(idle_since):
            return self.channel.ask(body, lambda: self.keep_waiting() and not self.stopping)

    @contextmanager
    def waiting(self, idle_since: Callable[[], float] = _ALWAYS) -> Iterator[None]:
        """Count the time of the block as waited, while it passes, and only as far as the device was idle.

        Args:
            idle_since: since when the device has had nothing to do; inf while it works.
        """
        self._wait = time.monotonic(), idle_since
        try:
            yield
        finally:
            self._count_wait()
            self._wait = None

    def _count_wait(self) -> None:
        if self._wait is None:
            return
        counted_until, idle_since = self._wait
        now = time.monotonic()
        self.notices.add(waiting_s=max(0.0, now - max(counted_until, idle_since())))
        self._wait = now, idle_since

    def keep_waiting(self) -> bool:
        """Called by the main thread some ten times a second while it waits; raises what ended a thread beside it."""
        self._count_wait()
        self.notices.progress()
        if self._thread_failure is not None:
            raise self._thread_failure
        return True

    def check_stop(self) -> None:
        """Raise StoppedError when told to stop."""
        if self.stopping:
            raise StoppedError

    def start_thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        """Run `body` beside the main thread, which gets its exception at the next wait."""

        def run() -> None:
            try:
                body()
            except ChannelClosedError:
                log.info("%s: stopped", name)
            except BaseException as error:
                self._thread_failure = error

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def every(self, interval_s: float, report: Callable[[], None]) -> None:
        """Call `report` where the last call is longer ago than that."""
        now = time.monotonic()
        if now - self._last_report_s >= interval_s:
            self._last_report_s = now
            report()

    def close(self) -> None:
        """End the conversation with the exchange."""
        if self._channel is not None:
            self._channel.close()

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """Signal handler: the main loop ends at its next turn."""
        self.stopping = True


def run_actor(role: str, main: Callable[[Actor], None], add_arguments: Callable[[argparse.ArgumentParser], None]) -> NoReturn:
    """Run an actor to its end and leave the process with its exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{role}")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--record", type=int, required=True, help="record on the board")
    parser.add_argument("--parent", type=int, required=True, help="pid of the supervisor, for common/actor/parent.py")
    parser.add_argument("--board-fd", type=int, required=True)
    add_arguments(parser)
    args = parser.parse_args()
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s", stream=sys.stderr)
    _leave(_live(role, args, main))


def _live(role: str, args: argparse.Namespace, main: Callable[[Actor], None]) -> int:
    """The one place of the process where exceptions end."""
    try:
        faults.load(args.run_dir, actor_name(role, args.index))
        actor = Actor(role, args)
        signal.signal(signal.SIGTERM, actor.stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's
        log.info("---- %s started, pid %d ----", actor.name, os.getpid())
        try:
            main(actor)
        except (ChannelClosedError, StoppedError):
            log.info("stopped")
            return EXIT_STOPPED
        finally:
            actor.close()
    except _HOPELESS as error:
        log.error("%s", error)
        return EXIT_HOPELESS
    except Exception:
        log.exception("failed")
        return EXIT_FAILED
    log.info("done")
    return EXIT_DONE


def _leave(code: int) -> NoReturn:
    """End as a kill would: where Python takes itself apart beside a thread that is inside torch, the process aborts."""
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)
