"""Starts the actors, watches them, restarts those that die, and ends the run. Loads no torch.

launch/operate/actor_state.py draws the states of one actor, this file those of the run. Actors are restarted one for
one. The drafters are one group, because their collectives couple them: when one dies, the survivors keep their
state in memory and the group forms anew (services/drafter/training/group.py).

    start -> running -- all drafters done ------------------> stop targets -> stop exchange -> ended
                |  ^                                              ^
                |  +-- restart -- an actor died                   |
                |                                                 |
                +-- SIGTERM, SIGHUP, ^C: stop drafters (they save)+
                +-- hopeless, crash loop, second Ctrl-C: kill all -> ended
"""

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import assert_never

from common.actor import faults
from common.actor.board import Board, Notice, Phase
from common.actor.channel import Channel
from common.actor.lifecycle import start_time
from common.actor.messages import ActorDied, Incarnation
from common.config import Config
from common.run_dir import exchange_address
from launch.operate.actor_state import Circumstances, Edge, State, Verdict, judge
from launch.operate.child import Child, Exit, wait_for_exit
from launch.operate.log_file import last_message
from launch.operate.restarts import Progress, Restarts
from launch.operate.topology import SharedFds, Topology

_TICK_S = 0.2
_DUMP_S = 1.0  # for the stacks of a hung actor, before it is killed
log = logging.getLogger(__name__)


class Supervisor:
    """One run, from the start of its actors to the end of the last."""

    def __init__(self, config: Config, topology: Topology, fds: SharedFds, board: Board, run_dir: Path) -> None:
        self._settings = config.supervision
        self._fds = fds
        self._board = board
        self.children = [Child(spec, run_dir) for spec in topology.actors]
        self.deaths = Restarts(config.supervision)
        self.failure = ""  # why the run was given up
        self.culprit: Child | None = None
        self.is_bad_input = False  # the culprit refused the input of the run
        self.signum = 0  # the signal that ended the run early, or 0
        self._num_interrupts = 0
        self._furthest_step = 0
        faults.load(run_dir, "supervisor")
        identity = Incarnation("supervisor", 0, os.getpid(), start_time(os.getpid()))
        self._channel = Channel(exchange_address(run_dir), identity)

    @property
    def is_stopping(self) -> bool:
        """Return whether the actors are being stopped, for any reason."""
        return bool(self._num_interrupts or self.failure or self._all_done("drafter"))

    def stop(self) -> None:
        """Stop as at SIGTERM: the drafters save; the second time at once."""
        self._interrupt(signal.SIGTERM, None)

    def replace(self, child: Child, *, gently: bool) -> None:
        """End an actor for an operator and start it again at once. It is no crash and never ends the run.

        Gently, a lone drafter saves first; among several none needs to, for the others hold the run in memory.
        """
        saves = len(self._of("drafter")) == 1 and self._is_ready(child)
        gently = gently and (child.spec.role != "drafter" or saves)
        now = time.monotonic()
        child.move(Edge.REPLACE, now + self._settings.stop_timeout_s if child.alive else now)
        child.send(signal.SIGTERM if gently else signal.SIGKILL)

    def run(self, on_tick: Callable[[], None]) -> bool:
        """Run to the end; return whether the training came to its end."""
        handlers = {signum: signal.signal(signum, self._interrupt) for signum in self._stop_signals()}
        handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # actors inherit it until they register theirs
        try:
            self._call_group()
            self._start_due()
            while not self.is_stopping:
                self._tick(on_tick)
            if not self.failure:
                self._stop_drafters(on_tick)
                for role in ("target", "exchange"):
                    self._end(self._of(role), signal.SIGTERM, on_tick)
            return self._all_done("drafter") and not self.failure
        finally:
            self._end(self.children, signal.SIGKILL, on_tick=lambda: None)
            self._channel.close()
            for signum, handler in handlers.items():
                signal.signal(signum, handler)

    def _tick(self, on_tick: Callable[[], None]) -> None:
        wait_for_exit(self.children, _TICK_S)
        for child in self.children:
            if exit_ := child.take_exit():
                self._handle_exit(child, exit_)
            elif child.alive:
                self._check_progress(child)
        self._start_due()
        on_tick()

    def _handle_exit(self, child: Child, exit_: Exit) -> None:
        """Report the end of an actor to the exchange, then act on its meaning."""
        self._channel.request(ActorDied(*exit_.owner))
        self._keep_counts(child)
        circumstances = Circumstances(child.spec.role, child.was_ready, bool(self._num_interrupts))
        verdict = judge(child.state, exit_.code, circumstances)
        match verdict:
            case Verdict.DONE:
                child.move(Edge.FINISH)
            case Verdict.STOPPED:
                child.move(Edge.LEAVE)
            case Verdict.REPLACED:
                self._restart(child, self.deaths.plan_replacement(child.spec.name))
            case Verdict.CRASHED:
                self._handle_crash(child, exit_)
            case Verdict.BAD_INPUT | Verdict.HOPELESS:
                self._give_up(child, f"{child.spec.name} ended with {exit_}", is_bad_input=verdict == Verdict.BAD_INPUT)
            case _:
                assert_never(verdict)

    def _keep_counts(self, child: Child) -> None:
        """Keep the figures of a record that the next incarnation will clear."""
        notice = self._notice(child)
        child.was_ready |= notice.phase == Phase.READY
        child.num_batches += notice.num_batches
        self._furthest_step = max([self._furthest_step, *(self._notice(other).step for other in self.children)])

    def _handle_crash(self, child: Child, exit_: Exit) -> None:
        """Restart the actor or give up. A process that exited by itself has logged why; one that was killed has not."""
        name = child.spec.name
        end = f"{exit_}: {last_message(child.log)}" if exit_.code > 0 else str(exit_)
        due = self.deaths.plan(name, self._progress(child))
        if isinstance(due, str):
            self._give_up(child, f"{name} ended {due}, last with {end}")
            return
        log.warning("%s ended with %s", name, end)
        self._restart(child, due)

    def _progress(self, child: Child) -> Progress:
        """Count the work of an actor: a drafter's is steps alone, for its batches may have been trained on before."""
        served = {"exchange": self._of("target"), "target": [child], "drafter": []}[child.spec.role]
        return Progress(self._furthest_step, sum(self._num_batches(target) for target in served))

    def _num_batches(self, target: Child) -> int:
        """Count the batches of all incarnations; the record of one that ended stays until the next one starts."""
        return target.num_batches + (self._notice(target).num_batches if target.alive else 0)

    def _restart(self, child: Child, due_s: float) -> None:
        child.move(Edge.RESTART, due_s)
        if child.was_ready:
            self.deaths.mark_down(child.spec.name, self._notice(child).progress_s)
        if child.spec.role == "drafter":
            self._call_group()

    def _call_group(self) -> None:
        """Call the drafters together under a number never used before; those that were done are needed again."""
        self._board.start_group(time.time_ns())
        for child in self._of("drafter"):
            if child.state == State.DONE:
                child.move(Edge.CALL, time.monotonic())

    def _start_due(self) -> None:
        for child in self.children:
            if child.state == State.DOWN and child.due_s <= time.monotonic():
                self._board.wipe(child.spec.record)
                child.start(self._fds)
                child.move(Edge.START)

    def _check_progress(self, child: Child) -> None:
        """Let a hung actor write its stacks, then kill it; only its end makes its slots free again."""
        if child.state != State.ALIVE:
            self._kill_if_due(child)
            return
        name, notice, now = child.spec.name, self._notice(child), time.monotonic()
        if notice.phase == Phase.READY:
            self.deaths.mark_up(name)
            silent_s, limit_s = now - notice.progress_s, self._settings.stall_timeout_s
        else:
            silent_s, limit_s = now - child.started_s, self._settings.ready_timeout_s
        if silent_s > limit_s and not self._waits_for_others(child):
            log.warning("%s made no progress for %.0f s: its stacks go to its log, then it is killed", name, silent_s)
            child.send(signal.SIGUSR1)
            child.move(Edge.HANG, now + _DUMP_S)

    def _kill_if_due(self, child: Child) -> None:
        if time.monotonic() >= child.due_s:
            child.send(signal.SIGKILL)

    def _waits_for_others(self, child: Child) -> bool:
        """Return whether it waits in a collective for a drafter outside of it, which is then the one to check."""
        group = [other for other in self._of("drafter") if other.alive]
        waits = child.spec.role == "drafter" and self._notice(child).in_collective
        return waits and not all(self._notice(other).in_collective for other in group)

    def _stop_drafters(self, on_tick: Callable[[], None]) -> None:
        """Let the drafters finish a step together and save; kill them where none holds the run in memory."""
        deadline, signalled, is_called = time.monotonic() + self._settings.stop_timeout_s, set[int](), False
        while (alive := [child for child in self._of("drafter") if child.alive]) and not self.failure:
            ready = [child for child in alive if self._is_ready(child)]
            if not ready or self._num_interrupts > 1 or time.monotonic() > deadline:
                self._end(alive, signal.SIGKILL, on_tick)
                return
            for child in ready:
                if child.pid not in signalled:  # a second signal would kill a process on its way out
                    child.send(signal.SIGTERM)
                    signalled.add(child.pid)
            if not is_called and not any(self._is_ready(child) for child in self._of("target")):
                is_called = True  # their next batches may never come: a new group saves the state it has
                self._board.start_group(time.time_ns())
            self._tick(on_tick)

    def _end(self, children: list[Child], signum: signal.Signals, on_tick: Callable[[], None]) -> None:
        """Signal the children and wait for their ends; after a time, or a second Ctrl-C, kill them."""
        deadline = time.monotonic() + self._settings.stop_timeout_s
        for child in children:
            child.send(signum)
        while any(child.alive for child in children):
            if self._num_interrupts > 1 or time.monotonic() > deadline:
                for child in children:
                    child.send(signal.SIGKILL)
            wait_for_exit(children, _TICK_S)
            for child in children:
                child.take_exit()
            on_tick()

    def _give_up(self, child: Child, reason: str, *, is_bad_input: bool = False) -> None:
        child.move(Edge.LEAVE)
        if not self.failure:
            self.failure, self.culprit, self.is_bad_input = reason, child, is_bad_input

    def _interrupt(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGHUP and self._num_interrupts:
            return  # shell and kernel both send one when a terminal closes: the second must not kill
        self._num_interrupts += 1
        self.signum = signum

    @staticmethod
    def _stop_signals() -> list[signal.Signals]:
        """Leave SIGHUP out where it is ignored: so nohup keeps a run alive."""
        hangs_up = [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]
        return [signal.SIGINT, signal.SIGTERM, *hangs_up]

    def _notice(self, child: Child) -> Notice:
        return self._board.read(child.spec.record)

    def _is_ready(self, child: Child) -> bool:
        return child.alive and self._notice(child).phase == Phase.READY

    def _of(self, role: str) -> list[Child]:
        return [child for child in self.children if child.spec.role == role]

    def _all_done(self, role: str) -> bool:
        return all(child.state == State.DONE for child in self._of(role))
