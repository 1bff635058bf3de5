"""How a run is, from the supervisor, the board and the slot table: it can be said also when every actor hangs."""

import math
import time
from pathlib import Path

from common.acceptance import find_best
from common.actor.board import Board, Phase
from common.ring.slot_table import SlotTable
from common.run_dir import actor_name
from launch.operate.actor_state import State
from launch.operate.child import Child
from launch.operate.control_messages import ActorState, ActorStatus, RingStatus, RunStatus
from launch.operate.pace import Pace
from launch.operate.supervisor import Supervisor

_STATES: dict[Phase, ActorState] = {Phase.STARTING: "starting", Phase.WARMING_UP: "warming up", Phase.READY: "ready"}


class Gauges:
    """All that shows the state of a run."""

    def __init__(self, run_dir: Path, supervisor: Supervisor, board: Board, table: SlotTable, pace: Pace) -> None:
        self._run_dir = run_dir
        self._supervisor = supervisor
        self._board = board
        self._table = table
        self._pace = pace
        self._started_s = time.monotonic()

    def read(self) -> RunStatus:
        """The state of this moment."""
        pace, lead, waiting = self._pace, self._pace.lead, self._pace.waiting()
        best = find_best(self._run_dir)
        return RunStatus(
            run_dir=str(self._run_dir),
            state="stopping" if self._supervisor.is_stopping else "running",
            uptime_s=time.monotonic() - self._started_s,
            step=lead.step,
            num_steps=lead.num_steps or None,
            num_skipped=lead.num_skipped,
            loss=lead.loss if lead.step and math.isfinite(lead.loss) else None,
            acceptance=lead.acceptance or None,
            best_acceptance=best.acceptance if best else None,
            best_step=best.step if best else None,
            target_tokens_per_s=pace.tokens_per_s("target"),
            drafter_tokens_per_s=pace.tokens_per_s("drafter"),
            verdict=waiting.verdict() if waiting else None,
            targets_waiting=waiting.targets if waiting else None,
            drafters_waiting=waiting.drafters if waiting else None,
            time_left_s=pace.time_left_s(),
            restarts=self._supervisor.deaths.counts.total(),
            actors=[self.read_actor(child) for child in self._supervisor.children],
            rings=self._read_rings(),
        )

    def read_actor(self, child: Child) -> ActorStatus:
        """The state of one actor."""
        name, now, notice = child.spec.name, time.monotonic(), self._board.read(child.spec.place)
        alive, deaths = child.alive, self._supervisor.deaths
        state: ActorState = _STATES[notice.phase]
        if not alive:
            state = "done" if child.state == State.DONE else "down"
        return ActorStatus(
            name=name,
            state=state,
            pid=child.pid if alive else None,
            uptime_s=now - child.started_s if alive else None,
            progress_age_s=now - notice.progress_s if alive else None,
            restarts=deaths.counts[name],
            lost_s=deaths.lost_s(name),
            last_exit=str(child.last_exit) if child.last_exit else None,
        )

    def _read_rings(self) -> list[RingStatus]:
        targets = [child for child in self._supervisor.children if child.spec.role == "target"]
        states = [self._table.read(slot).state.name.lower() for slot in range(len(self._table))]
        size = len(states) // len(targets)
        return [
            RingStatus(target=actor_name("target", ring), slots=states[ring * size : (ring + 1) * size])
            for ring in range(len(targets))
        ]
