"""Deaths, stops, hangs and damage in real runs: the losses and the final weights are those of an undisturbed run."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import torch

from common import config as configuration
from common.checksum import checksum
from common.dataset import Dataset
from common.layout import HEADER_BYTES, SlotHeader, SlotLayout
from common.memory import attach
from common.ring import ReadableSlot, RingReader
from common.slot_table import SlotState, SlotTable
from tests.launch.launched_runs import TWO_BY_TWO, LaunchedRun, identity, open_files, shared_memory

HUGE_NOISE = ("train.noise=gaussian", "train.noise_scale=3e38")  # no product of it is finite


def test_a_killed_target_exchange_and_drafter_change_nothing(reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start(*TWO_BY_TWO)
    for step, name in ((4, "target-0"), (12, "exchange"), (20, "drafter-1")):
        run.wait_for_step(step)
        killed = run.pid(name)
        os.kill(killed, signal.SIGKILL)
        run.wait_until(lambda name=name, killed=killed: run.pids(name) not in ([], [killed]))  # type: ignore[misc]
    assert run.end() == 0, run.log_tails()
    assert [run.num_lives(name) for name in ("exchange", "drafter-0", "drafter-1", "target-1")] == [2, 1, 2, 1]
    assert run.steps(rank=0) == reference.steps(rank=0)  # the survivor rolled nothing back: every step once
    assert "rank 0 gave its state" in run.log("drafter-1")
    assert run.losses() == reference.losses()
    assert run.evaluations() == reference.evaluations()
    assert run.weights() == reference.weights()
    assert run.pids() == []


def test_a_stopped_and_a_killed_run_go_on_where_they_were(reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start(*TWO_BY_TWO)
    run.wait_for_step(9)
    memory = {identity(path) for path in shared_memory(run.pid("drafter-0")).values()}
    assert len(memory & open_files()) == 3  # the board and two rings
    run.signal(signal.SIGTERM)
    assert run.end() == 143, run.log_tails()
    assert run.pids() == []
    assert not memory & open_files()
    assert f"--run-dir {run.directory}" in run.stdout
    last = run.steps()[-1]
    assert last < len(reference.steps())
    record = json.loads((run.directory / "checkpoints" / f"step-{last:08}" / "checkpoint.json").read_text())
    assert record["step"] == last

    run.start(*TWO_BY_TWO)
    run.wait_for_step(last + 2)
    assert run.steps()[: last + 1] == list(range(1, last + 2))  # no step was lost, none was done again
    memory = {identity(path) for path in shared_memory(run.pid("drafter-0")).values()}
    run.signal(signal.SIGKILL)
    assert run.end() == -signal.SIGKILL
    run.wait_until_gone(memory)

    run.start(*TWO_BY_TWO)
    frozen = _freeze(run, "drafter-1")
    run.wait_until(lambda: len(list((run.directory / "rendezvous").iterdir())) == 2)  # not where the killed group met
    _thaw(frozen)
    assert run.end() == 0, run.log_tails()
    assert run.losses() == reference.losses()
    assert run.evaluations() == reference.evaluations()
    assert run.weights() == reference.weights()


def test_a_stop_does_not_wait_for_drafters_that_wait_for_each_other(run: LaunchedRun) -> None:
    run.start('drafters.devices=["cpu", "cpu"]', "supervision.stop_timeout_s=1000")
    os.kill(run.pid("drafter-1"), signal.SIGSTOP)
    run.wait_until(lambda: "waiting for 2 ranks" in run.log("drafter-0"))
    run.signal(signal.SIGTERM)
    assert run.end() == 143
    assert run.pids() == []


def test_a_hung_actor_is_killed_and_started_again(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start("supervision.stall_timeout_s=4")
    run.wait_for_step(4)
    os.kill(run.pid("drafter-0"), signal.SIGUSR1)
    run.wait_until(lambda: "most recent call first" in run.log("drafter-0"))  # what a hung actor is asked for
    hung = run.pid("target-0")
    os.kill(hung, signal.SIGSTOP)
    assert run.end() == 0, run.log_tails()
    assert "target-0 made no progress for 4 s: its stacks go to its log, then it is killed" in run.stderr
    assert "target-0 ended with signal SIGKILL" in run.stderr
    assert run.losses() == small_reference.losses()
    assert run.weights() == small_reference.weights()


def test_an_actor_that_fails_again_and_again_ends_the_run(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    shutil.copytree(small_reference.directory / "data", run.directory / "data")
    _make_all_tokens_unknown(run.directory / "data" / "train")
    run.start("supervision.max_restarts=1")
    assert run.end() == 1
    assert "error: target-0 ended 2 times within 60 s, last with exit code 1" in run.stderr
    assert "IndexError: index out of range" in run.stderr
    assert f"(all of it: {run.directory / 'logs' / 'target-0.log'})" in run.stderr
    assert run.num_lives("target-0") == 2
    assert run.pids() == []


def test_a_damaged_slot_is_detected_and_produced_again(small_reference: LaunchedRun, run: LaunchedRun) -> None:
    run.start()
    run.wait_for_step(4)
    frozen = _freeze(run, "drafter-0")
    (_, first), (_, second), (third, slot) = _ready_slots(run, at_least=3)
    first.hidden_states.view(torch.int16)[-1, -1, -1] ^= 1
    second.rows.input_ids[0] ^= 1
    _write_header(run, third, slot.header._replace(plan_hash=bytes(16)))
    _thaw(frozen)
    assert run.end() == 0, run.log_tails()
    found = re.findall(r"slot \d, batch \d+: (.*): needed .*; it is produced again", run.log("drafter-0"))
    assert found == ["hidden states checksum", "rows checksum", "plan hash"]
    assert run.losses() == small_reference.losses()
    assert run.weights() == small_reference.weights()


def test_a_nan_skips_one_step_on_all_ranks(run: LaunchedRun) -> None:
    run.start('drafters.devices=["cpu", "cpu"]')
    run.wait_for_step(4)
    frozen = _freeze(run, "drafter-0", "drafter-1")
    _poison(run)
    _thaw(frozen)
    assert run.end() == 0, run.log_tails()
    assert len(run.skipped_steps()) == 1
    assert run.skipped_steps(rank=1) == run.skipped_steps()
    last = max((run.directory / "checkpoints").iterdir())
    optimizer = torch.load(last / "optimizer.pt", weights_only=True)
    assert int(optimizer["step"]) == len(run.steps()) - 1
    assert all(bool(torch.isfinite(values).all()) for values in optimizer.values())


def test_too_many_steps_that_are_not_finite_end_the_run(run: LaunchedRun) -> None:
    run.start('drafters.devices=["cpu", "cpu"]', *HUGE_NOISE, "train.max_nonfinite_steps=2")
    assert run.end() == 1
    assert "step 3: 3 steps in a row had a loss or gradient that is not finite (train.max_nonfinite_steps = 2)" in run.stderr
    assert run.skipped_steps() == [1, 2, 3]
    assert run.pids() == []


def _make_all_tokens_unknown(folder: Path) -> None:
    """In place, so that sizes and lengths stay right: only the target's forward can notice."""
    dataset = Dataset.open(folder)
    path = folder / "data-00000.arrow"
    tokens = np.concatenate([dataset.read(sample).input_ids for sample in range(dataset.num_samples)])
    content = path.read_bytes()
    assert content.count(tokens.tobytes()) == 1
    path.write_bytes(content.replace(tokens.tobytes(), np.full_like(tokens, 10**6).tobytes()))


def _freeze(run: LaunchedRun, *names: str) -> list[int]:
    pids = [run.pid(name) for name in names]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return pids


def _thaw(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def _ready_slots(run: LaunchedRun, at_least: int) -> list[tuple[int, ReadableSlot]]:
    """The first filled slots of ring 0 in the order of their batches, as the drafters will read them."""
    config = configuration.read(run.directory)
    num_slots = config.ring.num_slots
    table = SlotTable(_open(run, "exchange", "headrace-control"), num_slots)
    run.wait_until(lambda: table.counts()[SlotState.READY] >= at_least)
    ring = RingReader(_open(run, "target-0", "headrace-ring-0"), SlotLayout.of(config), num_slots)
    batches = {table.read(slot).batch: slot for slot in range(num_slots) if table.read(slot).state == SlotState.READY}
    return [(batches[batch], ring.open(batches[batch])) for batch in sorted(batches)[:at_least]]


def _poison(run: LaunchedRun) -> None:
    """Hidden states of NaN with the right checksum: as if the target had computed them."""
    (index, slot), *_ = _ready_slots(run, at_least=1)
    slot.hidden_states.fill_(torch.nan)
    _write_header(run, index, slot.header._replace(hidden_checksum=int(checksum(slot.hidden_states))))


def _write_header(run: LaunchedRun, index: int, header: SlotHeader) -> None:
    start = index * SlotLayout.of(configuration.read(run.directory)).stride
    memory = memoryview(attach(_open(run, "target-0", "headrace-ring-0")))
    header.pack_into(memory[start : start + HEADER_BYTES])


def _open(run: LaunchedRun, actor: str, name: str) -> int:
    return os.open(shared_memory(run.pid(actor))[name], os.O_RDWR)
