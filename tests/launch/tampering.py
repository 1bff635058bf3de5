"""Hands inside a living run: actors that stop where they stand, slots whose bytes change."""

import os
import signal

from common import config as configuration
from common.checksum import checksum
from common.layout import HEADER_BYTES, SlotHeader, SlotLayout
from common.memory import attach
from common.ring import ReadableSlot, RingReader
from common.slot_table import SlotState, SlotTable
from tests.launch.launched_runs import LaunchedRun, shared_memory


def freeze(run: LaunchedRun, *names: str) -> list[int]:
    """Stop actors where they stand; returns their pids."""
    pids = [run.pid(name) for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def thaw(pids: list[int]) -> None:
    """Let them go on."""
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def ready_slots(run: LaunchedRun, at_least: int) -> list[tuple[int, ReadableSlot]]:
    """The first filled slots of ring 0 in the order of their batches, as the drafters will read them."""
    config = configuration.read(run.directory)
    num_slots = config.ring.num_slots
    table = SlotTable(open_memory(run, "exchange", "headrace-control"), num_slots)
    run.wait_until(lambda: table.counts()[SlotState.READY] >= at_least)
    ring = RingReader(open_memory(run, "target-0", "headrace-ring-0"), SlotLayout.of(config), num_slots)
    batches = {table.read(slot).batch: slot for slot in range(num_slots) if table.read(slot).state == SlotState.READY}
    return [(batches[batch], ring.open(batches[batch])) for batch in sorted(batches)[:at_least]]


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
    """A descriptor of shared memory that an actor has open."""
    return os.open(shared_memory(run.pid(actor))[name], os.O_RDWR)
