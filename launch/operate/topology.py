"""Which processes a run has, as a value: printable, testable, started by nobody here."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.actor.board import board_bytes
from common.config import Config
from common.ring.layout import SlotLayout
from common.ring.slot_table import table_bytes
from common.run_dir import actor_name


@dataclass(frozen=True)
class ActorSpec:
    """One actor of a run."""

    role: str
    index: int
    device: str
    place: int  # record on the board

    @property
    def name(self) -> str:
        """As in the log, the metrics and the commands of an operator."""
        return actor_name(self.role, self.index)


class Topology(NamedTuple):
    """The actors in the order of their start, and the memory they share."""

    actors: list[ActorSpec]
    ring_bytes: int  # of each target
    table_bytes: int
    board_bytes: int
    num_rings: int

    @property
    def shared_bytes(self) -> int:
        """All shared memory of the run."""
        return self.num_rings * self.ring_bytes + self.table_bytes + self.board_bytes


class SharedFds(NamedTuple):
    """The run's memfds; numbers stay the same in every child and over every restart."""

    rings: list[int]
    control: int
    board: int


def plan_topology(config: Config) -> Topology:
    """The exchange, then the targets, then the drafters."""
    roles = [("exchange", ["cpu"]), ("target", config.targets.devices), ("drafter", config.drafters.devices)]
    entries = [(role, index, device) for role, devices in roles for index, device in enumerate(devices)]
    actors = [ActorSpec(role, index, device, place) for place, (role, index, device) in enumerate(entries)]
    return Topology(
        actors=actors,
        ring_bytes=SlotLayout.of(config).ring_bytes(config.ring.num_slots),
        table_bytes=table_bytes(config.num_targets * config.ring.num_slots),
        board_bytes=board_bytes(len(actors)),
        num_rings=config.num_targets,
    )


def command(python: str, spec: ActorSpec, run_dir: Path, fds: SharedFds, supervisor_pid: int) -> list[str]:
    """The command line of one life of an actor."""
    line = [python, "-m", f"services.{spec.role}", "--run-dir", str(run_dir), "--index", str(spec.index)]
    line += ["--record", str(spec.place), "--parent", str(supervisor_pid), "--board-fd", str(fds.board)]
    if spec.role == "exchange":
        return [*line, "--control-fd", str(fds.control)]
    if spec.role == "target":
        return [*line, "--ring-fd", str(fds.rings[spec.index])]
    return [*line, "--ring-fds", ",".join(map(str, fds.rings))]


def inherited_fds(spec: ActorSpec, fds: SharedFds) -> list[int]:
    """The memory an actor may touch, and no more."""
    own = {"exchange": [fds.control], "target": fds.rings[spec.index : spec.index + 1], "drafter": fds.rings}
    return [fds.board, *own[spec.role]]


def describe(topology: Topology) -> str:
    """The process plan and its memory, for `--dry-run` and the head of a run."""
    gib = 2**30
    lines = [f"  {spec.name:<12} python -m services.{spec.role:<9} {spec.device}" for spec in topology.actors]
    rings = f"{topology.num_rings} rings of {topology.ring_bytes / gib:.3f} GiB"
    memory = f"  {rings}, {topology.shared_bytes / gib:.3f} GiB shared memory in all"
    return "\n".join([*lines, memory])
