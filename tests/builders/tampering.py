"""Hands inside a living run: actors that stop where they stand, slots whose bytes change."""

import json
import os
import signal
from pathlib import Path

from common import config as configuration
from common.ring.checksum import checksum
from common.ring.layout import HEADER_BYTES, SlotHeader, SlotLayout
from common.ring.memory import attach
from common.ring.ring import ReadableSlot, RingReader
from common.ring.slot_table import SlotState, SlotTable
from tests.builders.launched_runs import LaunchedRun, shared_memory


def freeze(run: LaunchedRun, *names: str) -> list[int]:
    """Stop actors where they stand; returns their pids once no thread of them runs any more."""
    pids = [run.pid(name) for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    run.wait_until(lambda: all(map(is_stopped, pids)))
    return pids


def is_stopped(pid: int) -> bool:
    """Return whether no thread of a process runs any more."""
    return _thread_states(pid) == {"T"}


def thaw(pids: list[int]) -> None:
    """Let them go on."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def ready_slots(run: LaunchedRun, at_least: int) -> list[tuple[int, ReadableSlot]]:
    """The first filled slots of ring 0 in the order of their batches, as the frozen drafters will read them.

    The exchange may still grant one of them to a drafter that asked before it was frozen.
    """
    config = configuration.read(run.directory)
    num_slots = config.ring.num_slots
    table = SlotTable(open_memory(run, "exchange", "headrace-control"), num_slots)
    slots: list[int] = []

    def are_enough() -> bool:
        records = {slot: table.read(slot) for slot in range(num_slots)}
        ready = [slot for slot, record in records.items() if record.state == SlotState.READY]
        slots[:] = sorted(ready, key=lambda slot: records[slot].batch)[:at_least]
        return len(slots) == at_least

    run.wait_until(are_enough)
    ring = RingReader(open_memory(run, "target-0", "headrace-ring-0"), SlotLayout.of(config), num_slots)
    return [(slot, ring.open(slot)) for slot in slots]


def poison(run: LaunchedRun, index: int, slot: ReadableSlot, value: float) -> None:
    """One value among the hidden states, with the right checksum: as if the target had computed it."""
    slot.hidden_states[0, 0, 0] = value
    write_header(run, index, slot.header._replace(hidden_checksum=int(checksum(slot.hidden_states))))


def write_header(run: LaunchedRun, index: int, header: SlotHeader) -> None:
    """Replace the header of a slot of ring 0."""
    start = index * SlotLayout.of(configuration.read(run.directory)).stride
    memory = memoryview(attach(open_memory(run, "target-0", "headrace-ring-0")))
    header.pack_into(memory[start : start + HEADER_BYTES])


def open_memory(run: LaunchedRun, actor: str, name: str) -> int:
    """Open shared memory that an actor has open."""
    return open_memory_of(run.pid(actor), name)


def open_memory_of(pid: int, name: str) -> int:
    return os.open(shared_memory(pid)[name], os.O_RDWR)


def _thread_states(pid: int) -> set[str]:
    """The states of its threads by the letters of proc(5): T where a signal stopped it; "" where it ended meanwhile."""
    return {_thread_state(path) for path in Path(f"/proc/{pid}/task").glob("*/stat")}


def _thread_state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def forget_checksums(checkpoint: Path) -> None:
    """Make a checkpoint one of before there were checksums, so that changed weights are taken."""
    path = checkpoint / "checkpoint.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({key: content[key] for key in content if key not in ("files", "sha256")}))
