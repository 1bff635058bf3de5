"""Slot records in shared memory, and what an exchange leaves that is killed between two stores."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest

from common.errors import SharedMemoryError
from common.ring import memory
from common.ring.slot_table import NOBODY, Owner, SlotRecord, SlotState, SlotTable, table_bytes
from services.exchange.leases import TRANSITIONS, Edge, Leases

TARGET, DRAFTER, OLD = Owner(41, 4), Owner(52, 5), Owner(63, 6)


def make_pair(num_slots: int) -> tuple[SlotTable, SlotTable]:
    """The exchange's table, and the same memory seen by another."""
    fd = memory.create("test-control", table_bytes(num_slots))
    tables = SlotTable(fd, num_slots), SlotTable(fd, num_slots)
    os.close(fd)
    return tables


def test_records_come_back_as_they_were_written_and_others_see_them() -> None:
    table, seen = make_pair(100)
    records = [SlotRecord(SlotState(slot % 4), slot * 2**40, 2**50 + slot, Owner(slot, 2**45 + slot)) for slot in range(100)]
    for slot, record in enumerate(records):
        table.write(slot, record)
    assert [seen.read(slot) for slot in range(len(seen))] == records
    assert seen.counts() == dict.fromkeys(SlotState, 25)


def test_fresh_memory_is_all_free_and_used_memory_stays_as_it_is() -> None:
    table, again = make_pair(3)
    table.claim()
    assert table.read(2) == SlotRecord(SlotState.FREE, 0, 0, NOBODY)
    record = SlotRecord(SlotState.READY, 3, 9, TARGET)
    table.write(1, record)
    again.claim()
    assert again.read(1) == record


def test_memory_of_another_kind_or_size_is_refused() -> None:
    fd = memory.create("test-control", table_bytes(3))
    with pytest.raises(SharedMemoryError, match=r"control memory: needed 12288 bytes, found 8192"):
        SlotTable(fd, 100)
    memory.attach(fd)[:8] = b"whatever"
    with pytest.raises(SharedMemoryError, match=r"needed a slot table, found magic 0x"):
        SlotTable(fd, 3).claim()
    os.close(fd)


class KilledError(Exception):
    """The end of the exchange, between two stores."""


@contextmanager
def killed_before_line(number: int) -> Iterator[None]:
    """Raise KilledError before the `number`-th line that SlotTable.write executes, counted from 0."""
    lines_left = number

    def on_line(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal lines_left
        if event == "line":
            lines_left -= 1
            if lines_left < 0:
                raise KilledError
        return on_line

    def on_call(frame: FrameType, event: str, arg: object) -> Any:
        return on_line if frame.f_code is SlotTable.write.__code__ else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)


def meaning(record: SlotRecord) -> tuple[object, ...]:
    """A record without what means nothing in its state."""
    if record.state == SlotState.FREE:
        return (record.state,)
    if record.state == SlotState.READY:
        return record[:3]
    return record


EDGES: list[tuple[Edge, SlotState, Callable[[Leases], SlotRecord]]] = [
    (Edge.LEASE, SlotState.FREE, lambda leases: leases.lease(1, 23, TARGET)),
    (Edge.PUBLISH, SlotState.WRITING, lambda leases: leases.follow(1, Edge.PUBLISH)),
    (Edge.ABANDON, SlotState.WRITING, lambda leases: leases.follow(1, Edge.ABANDON)),
    (Edge.GRANT, SlotState.READY, lambda leases: leases.grant(1, DRAFTER)),
    (Edge.EVICT, SlotState.READY, lambda leases: leases.follow(1, Edge.EVICT)),
    (Edge.RELEASE, SlotState.READING, lambda leases: leases.follow(1, Edge.RELEASE)),
    (Edge.RETURN, SlotState.READING, lambda leases: leases.follow(1, Edge.RETURN)),
]


@pytest.mark.parametrize(("edge", "state", "act"), EDGES, ids=[edge.name for edge, _, _ in EDGES])
def test_an_exchange_killed_between_two_stores_leaves_the_old_or_the_new_state(
    edge: Edge, state: SlotState, act: Callable[[Leases], SlotRecord]
) -> None:
    old = SlotRecord(state, 6, 17, OLD)
    found = []
    for number in range(100):
        table, seen = make_pair(3)
        table.write(1, old)
        try:
            with killed_before_line(number):
                new = act(Leases(table, num_rings=1))
        except KilledError:
            record = seen.read(1)
            assert record.generation >= old.generation, "a generation that was given away must not come back"
            found.append(meaning(record))
            assert seen.read(0) == seen.read(2) == SlotRecord(SlotState.FREE, 0, 0, NOBODY)
        else:
            break
    assert len(found) == 6  # before each of the lines of write
    assert found == [meaning(old)] * 6
    assert meaning(seen.read(1)) == meaning(new) != meaning(old)


def test_every_edge_is_in_the_list() -> None:
    assert {(state, edge) for edge, state, _ in EDGES} == set(TRANSITIONS)
