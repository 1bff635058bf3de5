"""An actor process, from its command line to its exit code.

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
from common.errors import PermanentError, ProtocolError
from common.metrics import MetricsWriter
from common.run_dir import actor_name, exchange_address

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_HOPELESS = 2  # a restart would fail in the same way
EXIT_STOPPED = 4  # stopped before its work was done
_ALWAYS = float  # idle since 0.0

log = logging.getLogger(__name__)


class StoppedError(Exception):
    """The actor has received SIGTERM and has left everything in order."""


def start_time(pid: int) -> int:
    """Return the start of a process in clock ticks since boot: field 22 of /proc/PID/stat."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


class Actor:
    """The parts that every actor has: its name, its settings, its notice, its metrics, its channel to the exchange."""

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
        """Open the channel to the exchange and send Hello."""
        self._channel = Channel(exchange_address(self.run_dir), self.incarnation)
        welcome = self.ask(Hello(PROTOCOL_VERSION))
        if not isinstance(welcome, Welcome):
            raise ProtocolError(f"Hello: needed Welcome, found {welcome}")
        return welcome

    @property
    def channel(self) -> Channel:
        assert self._channel is not None, "join() comes first"
        return self._channel

    def ask(self, body: RequestBody, idle_since: Callable[[], float] = _ALWAYS) -> ReplyBody:
        """Send a request and wait for the reply, counted as in `waiting`; ChannelClosedError after SIGTERM."""
        with self.waiting(idle_since):
            return self.channel.ask(body, lambda: self.keep_waiting() and not self.stopping)

    @contextmanager
    def waiting(self, idle_since: Callable[[], float] = _ALWAYS) -> Iterator[None]:
        """Count the time of the block as waited, while it passes, but only since `idle_since` (inf while the device works)."""
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
        """Show progress, some ten times a second while the main thread waits; raise the exception that ended another thread."""
        self._count_wait()
        self.notices.progress()
        if self._thread_failure is not None:
            raise self._thread_failure
        return True

    def check_stop(self) -> None:
        if self.stopping:
            raise StoppedError

    def start_thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        """Run `body` in a thread; the main thread raises its exception at the next wait."""

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
        """Call `report` unless it was called within the interval."""
        now = time.monotonic()
        if now - self._last_report_s >= interval_s:
            self._last_report_s = now
            report()

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()

    def stop(self, signum: int, frame: FrameType | None) -> None:
        """End the main loop at its next turn (a signal handler)."""
        self.stopping = True


def run_actor(role: str, main: Callable[[Actor], None], add_arguments: Callable[[argparse.ArgumentParser], None]) -> NoReturn:
    """Run an actor to its end and exit with its code."""
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
    _exit(_run(role, args, main))


def _run(role: str, args: argparse.Namespace, main: Callable[[Actor], None]) -> int:
    """Run `main`; no exception leaves this function."""
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
    except PermanentError as error:
        log.error("%s", error)
        return EXIT_HOPELESS
    except Exception:
        log.exception("failed")
        return EXIT_FAILED
    log.info("done")
    return EXIT_DONE


def _exit(code: int) -> NoReturn:
    """Exit without interpreter shutdown: finalising Python while another thread runs torch code aborts the process."""
    sys.stdout.flush()
    logging.shutdown()
    os._exit(code)
