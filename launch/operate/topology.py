"""The processes of a run and their shared memory, as a value: printable and testable without starting anything."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.actor.board import board_bytes
from common.config import Config
from common.ring import memory
from common.ring.layout import SlotLayout
from common.ring.slot_table import table_bytes
from common.run_dir import actor_name

_GIB = 2**30


@dataclass(frozen=True)
class ActorSpec:
    """One actor of a run."""

    role: str
    index: int
    device: str  # of a target that is split: several, joined by "+"
    record: int  # on the board

    @property
    def name(self) -> str:
        """Name in logs, metrics and the commands of an operator."""
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
    """List the exchange, then the targets, then the drafters, and size their memory."""
    roles = [("exchange", ["cpu"]), ("target", config.targets.devices), ("drafter", config.drafters.devices)]
    entries = [(role, index, device) for role, devices in roles for index, device in enumerate(devices)]
    actors = [ActorSpec(*entry, record) for record, entry in enumerate(entries)]
    return Topology(
        actors=actors,
        ring_bytes=SlotLayout.of(config).ring_bytes(config.ring.num_slots),
        table_bytes=table_bytes(config.num_targets * config.ring.num_slots),
        board_bytes=board_bytes(len(actors)),
        num_rings=config.num_targets,
    )


def create_memory(topology: Topology) -> SharedFds:
    """Allocate all shared memory of a run in full; ConfigError where the machine has too little."""
    rings = [memory.create(f"headrace-ring-{index}", topology.ring_bytes) for index in range(topology.num_rings)]
    control = memory.create("headrace-control", topology.table_bytes)
    return SharedFds(rings, control, memory.create("headrace-board", topology.board_bytes))


def command(python: str, spec: ActorSpec, run_dir: Path, fds: SharedFds, supervisor_pid: int) -> list[str]:
    """Return the command line of an actor."""
    line = [python, "-m", f"services.{spec.role}", "--run-dir", str(run_dir), "--index", str(spec.index)]
    line += ["--record", str(spec.record), "--parent", str(supervisor_pid), "--board-fd", str(fds.board)]
    if spec.role == "exchange":
        return [*line, "--control-fd", str(fds.control)]
    if spec.role == "target":
        return [*line, "--ring-fd", str(fds.rings[spec.index])]
    return [*line, "--ring-fds", ",".join(map(str, fds.rings))]


def inherited_fds(spec: ActorSpec, fds: SharedFds) -> list[int]:
    """Return the memory that an actor may touch."""
    own = {"exchange": [fds.control], "target": fds.rings[spec.index : spec.index + 1], "drafter": fds.rings}
    return [fds.board, *own[spec.role]]


def describe_gpus(topology: Topology, memory: list[int]) -> str:
    """Format the memory of each GPU of the run, in bytes by number, and who is on it; "" where no GPU is used."""
    users: dict[str, list[str]] = {}
    for spec in topology.actors:
        for device in spec.device.split("+"):
            users.setdefault(device, []).append(spec.name)
    gpus = {int(device.removeprefix("cuda:")): names for device, names in users.items() if device != "cpu"}
    sizes = {index: f"{memory[index] / _GIB:.1f} GiB" if index < len(memory) else "absent" for index in gpus}
    return "".join(f"\n  cuda:{index:<7} {sizes[index]:<10} {', '.join(gpus[index])}" for index in sorted(gpus))


def describe(topology: Topology) -> str:
    """Format the processes and their memory, for `--dry-run` and the head of a run."""
    lines = [f"  {spec.name:<12} python -m services.{spec.role:<9} {spec.device}" for spec in topology.actors]
    rings = f"{topology.num_rings} rings of {topology.ring_bytes / _GIB:.3f} GiB"
    return "\n".join([*lines, f"  {rings}, {topology.shared_bytes / _GIB:.3f} GiB shared memory in all"])
