"""Starts the actors, watches them, restarts what dies, and ends the run. Loads no torch.

The exchange and the targets are restarted one for one. The drafters are one group, because their
collectives couple them: when one dies, all are ended and start again from the last checkpoint.

    start -> running -- all drafters done ------------------> stop targets -> stop exchange -> ended
                |  ^                                              ^
                |  +-- restart -- an actor died                   |
                |                                                 |
                +-- SIGTERM, Ctrl-C: stop drafters (they save) ---+
                +-- hopeless, crash loop, second Ctrl-C: kill all -> ended
"""

import collections
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from common.addresses import exchange_address
from common.board import Board, Phase
from common.channel import Channel
from common.config import Config
from common.lifecycle import EXIT_DONE, EXIT_HOPELESS, start_time
from common.messages import ActorDied, Incarnation
from launch.child import Child, Exit, wait_for_exit
from launch.topology import SharedFds, Topology

_TICK_S = 0.2
_DUMP_S = 1.0  # from asking for the stacks to the kill
log = logging.getLogger(__name__)


class Supervisor:
    """One run, from the start of its actors to the end of the last."""

    def __init__(self, config: Config, topology: Topology, fds: SharedFds, board: Board, run_dir: Path) -> None:
        self._settings = config.supervision
        self._fds = fds
        self._board = board
        self.children = [Child(spec, run_dir) for spec in topology.actors]
        self.restarts: collections.Counter[str] = collections.Counter()
        self.failure = ""  # why the run was given up
        self.culprit: Child | None = None
        self.is_bad_input = False  # the culprit refused its input before it was ever ready
        self._recent: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        self._due: dict[str, float] = {}  # name -> when to start again
        self._dumped: dict[str, float] = {}
        self._was_ready: set[str] = set()
        self._group = time.time_ns()  # a group never meets what a killed run left at the meeting place
        self._group_is_falling = False
        self._done: set[str] = set()
        self._interrupts = 0
        self._signum = 0
        identity = Incarnation("supervisor", 0, os.getpid(), start_time(os.getpid()))
        self._channel = Channel(exchange_address(run_dir), identity)

    @property
    def signum(self) -> int:
        """The signal that ended the run early, or 0."""
        return self._signum

    def run(self, on_tick: Callable[[], None]) -> bool:
        """Run to the end; True where the training came to its end."""
        handlers = {signum: signal.signal(signum, self._interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
        try:
            for child in self.children:
                self._start(child)
            while not (self._interrupts or self.failure or self._all_done("drafter")):
                self._tick(on_tick)
            if not self.failure:
                for role in ("drafter", "target", "exchange"):
                    self._stop(role, on_tick)
            return self._all_done("drafter") and not self.failure
        finally:
            self._kill_all()
            self._channel.close()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def _tick(self, on_tick: Callable[[], None]) -> None:
        wait_for_exit(self.children, _TICK_S)
        for child in self.children:
            exit_ = child.take_exit()
            if exit_ is not None:
                self._bury(child, exit_)
            elif child.alive:
                self._check_progress(child)
        self._start_due()
        on_tick()

    def _bury(self, child: Child, exit_: Exit) -> None:
        """An actor's end: tell the exchange, then decide what it means."""
        name, role = child.spec.name, child.spec.role
        self._channel.request(ActorDied(*exit_.owner))
        self._dumped.pop(name, None)
        if self._board.read(child.spec.place).phase != Phase.STARTING:
            self._was_ready.add(name)
        if exit_.code == EXIT_DONE and role == "drafter":
            self._done.add(name)
        elif self._interrupts and role == "drafter":
            return  # it was told to end
        elif role == "drafter" and self._group_is_falling:
            return
        elif exit_.code == EXIT_HOPELESS or (exit_.code > 0 and name not in self._was_ready):
            self._give_up(child, f"{name} ended with {exit_}", hopeless=exit_.code == EXIT_HOPELESS)
        else:
            log.warning("%s ended with %s", name, exit_)
            self._plan_restart(child, exit_)

    def _plan_restart(self, child: Child, exit_: Exit) -> None:
        name, now = child.spec.name, time.monotonic()
        recent = self._recent[name]
        recent.append(now)
        while recent[0] < now - self._settings.window_s:
            recent.popleft()
        if len(recent) > self._settings.max_restarts:
            self._give_up(child, f"{name} ended {len(recent)} times within {self._settings.window_s:g} s, last with {exit_}")
            return
        self.restarts[name] += 1
        due = now + self._settings.backoff_s * (2 ** (len(recent) - 1) - 1)
        if child.spec.role == "drafter":
            self._fell_group(due)
        else:
            self._due[name] = due

    def _fell_group(self, due: float) -> None:
        self._group_is_falling = True
        self._done.clear()
        for child in self._of("drafter"):
            child.send(signal.SIGKILL)
            self._due[child.spec.name] = due

    def _start_due(self) -> None:
        if self._group_is_falling and not any(child.alive for child in self._of("drafter")):
            self._group_is_falling = False
            self._group += 1
        now = time.monotonic()
        for child in self.children:
            waits = child.alive or (child.spec.role == "drafter" and self._group_is_falling)
            if not waits and self._due.get(child.spec.name, now + 1) <= now:
                del self._due[child.spec.name]
                self._start(child)

    def _start(self, child: Child) -> None:
        self._board.wipe(child.spec.place)
        child.start(self._fds, self._group)

    def _check_progress(self, child: Child) -> None:
        """A hung actor is asked for its stacks, then killed; only its end makes its slots free again."""
        name, notice, now = child.spec.name, self._board.read(child.spec.place), time.monotonic()
        if notice.phase == Phase.STARTING:
            silent_s, limit_s = now - child.started_s, self._settings.ready_timeout_s
        else:
            silent_s, limit_s = now - notice.progress_s, self._settings.stall_timeout_s
        if name in self._dumped:
            if now >= self._dumped[name]:
                child.send(signal.SIGKILL)
        elif silent_s > limit_s:
            log.warning("%s made no progress for %.0f s: its stacks go to its log, then it is killed", name, silent_s)
            child.send(signal.SIGUSR1)
            self._dumped[name] = now + _DUMP_S

    def _stop(self, role: str, on_tick: Callable[[], None]) -> None:
        """Ask the actors of a role to end and wait; what they need to end stays under watch."""
        deadline = time.monotonic() + self._settings.stop_timeout_s
        signum = signal.SIGKILL if role == "drafter" and self._group_is_forming() else signal.SIGTERM
        for child in self._of(role):
            self._due.pop(child.spec.name, None)
            child.send(signum)
        while any(child.alive for child in self._of(role)) and not self.failure:
            if self._interrupts > 1 or time.monotonic() > deadline:
                for child in self._of(role):
                    child.send(signal.SIGKILL)
            if role == "drafter":
                self._tick(on_tick)
            else:
                wait_for_exit(self._of(role), _TICK_S)
                for child in self._of(role):
                    child.take_exit()

    def _group_is_forming(self) -> bool:
        """Whether a drafter still loads or waits for the others, deaf to SIGTERM and with nothing to save."""
        return any(child.alive and self._board.read(child.spec.place).phase == Phase.STARTING for child in self._of("drafter"))

    def _kill_all(self) -> None:
        for child in self.children:
            child.send(signal.SIGKILL)
        while any(child.alive for child in self.children):
            wait_for_exit(self.children, _TICK_S)
            for child in self.children:
                child.take_exit()

    def _give_up(self, child: Child, reason: str, *, hopeless: bool = False) -> None:
        if not self.failure:
            self.failure, self.culprit = reason, child
            self.is_bad_input = hopeless and child.spec.name not in self._was_ready

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        self._interrupts += 1
        self._signum = signum

    def _of(self, role: str) -> list[Child]:
        return [child for child in self.children if child.spec.role == role]

    def _all_done(self, role: str) -> bool:
        return all(child.spec.name in self._done for child in self._of(role))
