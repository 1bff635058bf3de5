"""The state of a run from the supervisor, the board and the slot table: it can be read also when every actor hangs."""

import math
import time
from pathlib import Path
from typing import Any

import msgspec

from common.acceptance import find_best
from common.actor.board import Board, Phase
from common.ring.slot_table import SlotTable
from common.run_dir import metrics_path
from launch.operate.actor_state import State
from launch.operate.child import Child
from launch.operate.control_messages import ActorState, ActorStatus, DeviceStatus, RingStatus, RunStatus
from launch.operate.pace import Pace
from launch.operate.supervisor import Supervisor

_TAIL_BYTES = 1 << 16
_BUSY = ("upload_s", "forward_s", "pack_s")
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
        """Return the state of this moment."""
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
            best_unary=best.selector.acceptance_unary if best and best.selector else None,
            best_oracle=best.selector.acceptance_oracle if best and best.selector else None,
            target_tokens_per_s=pace.tokens_per_s("target"),
            drafter_tokens_per_s=pace.tokens_per_s("drafter"),
            verdict=waiting.verdict() if waiting else None,
            targets_waiting=waiting.targets if waiting else None,
            drafters_waiting=waiting.drafters if waiting else None,
            time_left_s=pace.time_left_s(),
            restarts=self._supervisor.deaths.counts.total(),
            actors=[self._read_actor(child) for child in self._supervisor.children],
            rings=self._read_rings(),
        )

    def _read_actor(self, child: Child) -> ActorStatus:
        name, now, notice = child.spec.name, time.monotonic(), self._board.read(child.spec.record)
        ended: ActorState = "done" if child.state == State.DONE else "down"
        return ActorStatus(
            name=name,
            state=_STATES[notice.phase] if child.alive else ended,
            pid=child.pid if child.alive else None,
            uptime_s=now - child.started_s if child.alive else None,
            progress_age_s=now - notice.progress_s if child.alive else None,
            restarts=self._supervisor.deaths.counts[name],
            lost_s=self._supervisor.deaths.lost_s(name),
            last_exit=str(child.last_exit) if child.last_exit else None,
            devices=self._read_devices(child),
        )

    def _read_devices(self, child: Child) -> list[DeviceStatus]:
        """Return the actor's devices, with the figures of a target's last line of metrics while it is alive."""
        names, path = child.spec.device.split("+"), metrics_path(self._run_dir, child.spec.name)
        line = _last_object(path) if child.alive and child.spec.role == "target" else {}
        figures: list[dict[str, Any]] = line.get("devices", [line] if line else [])
        if len(figures) != len(names):
            return [DeviceStatus(name) for name in names]
        busy = [min(1.0, sum(each[name] for name in _BUSY) / line["interval_s"]) for each in figures]
        memory = [each.get("reserved_bytes") for each in figures]
        return [DeviceStatus(*each) for each in zip(names, busy, memory, strict=True)]

    def _read_rings(self) -> list[RingStatus]:
        targets = [child.spec.name for child in self._supervisor.children if child.spec.role == "target"]
        states = [self._table.read(slot).state.name.lower() for slot in range(len(self._table))]
        size = len(states) // len(targets)
        return [RingStatus(target=name, slots=states[i * size : (i + 1) * size]) for i, name in enumerate(targets)]


def _last_object(path: Path) -> dict[str, Any]:
    """Return the last whole line of a file of metrics; {} where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            *_, line, _ = [b"", *file.read().split(b"\n")]  # the last one ends with a line feed, or is being written
            return msgspec.json.decode(line, type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
