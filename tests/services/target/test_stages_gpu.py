"""A target in stages on GPUs: bits of one stage, batches in flight on all stages, nothing waits.

On one GPU two stages have a stream each, which `common.config` does not allow but the model does: streams, marks and buffers
are the same as on two.
"""

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from common.actor.messages import BatchShape
from common.config import Config, TargetsConfig
from common.device.copy_stream import Mark
from common.errors import ConfigError
from common.ring import memory
from common.ring.checksum import checksum
from common.ring.layout import SlotLayout
from common.ring.ring import RingWriter, WritableSlot
from services.target.model import TargetModel
from services.target.rows import TargetRows
from services.target.staging import Staging
from services.target.warmup import WarmUp
from tests.services.target.test_hot_path_gpu import BUCKETS, BUDGET, make_batch, make_config, no_waiting
from tests.services.target.test_hot_path_gpu import folder as folder  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")
NUM_SLOTS = 8
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
SPLITS = [[FIRST, FIRST], [FIRST, FIRST, FIRST], pytest.param([FIRST, SECOND], marks=TWO_GPUS)]
BATCHES = [([1000, 17, 1024], 0), ([1, 250, 256, 99], 1), ([700], 2), ([1024] * 8, 3), ([256] * 30, 4), ([1024] * 8, 5)]


def split_config(folder: Path) -> Config:
    return msgspec.structs.replace(make_config(folder), targets=TargetsConfig(devices=["cuda:0+cuda:1"]))


class Target:
    """Model, staging buffers and a registered ring; the caller waits for marks."""

    def __init__(self, config: Config, devices: list[torch.device], compiled: bool = False) -> None:
        self.layout = SlotLayout.of(config)
        self.model = TargetModel.load(config, *devices)
        if compiled:
            self.model.compile_layers()
        shapes = [BatchShape(BUDGET // length, length) for length in BUCKETS] + [BatchShape(3, BUCKETS[0])]
        self.stagings = WarmUp(self.model, self.layout, config.plan).run(shapes, lambda: None)
        self.writer = RingWriter(memory.create("ring", self.layout.ring_bytes(NUM_SLOTS)), self.layout, NUM_SLOTS)

    def launch(self, number: int, rows: TargetRows) -> tuple[list[Mark], Staging, WritableSlot]:
        staging = self.stagings[number % len(self.stagings)]
        slot = self.writer.open(number % NUM_SLOTS, len(rows.token_index), len(rows.packed.sample_ids))
        self.model.run(staging.upload(rows), staging.keep, staging.enter)
        return staging.copy_to(slot), staging, slot


def wait(marks: list[Mark]) -> None:
    for mark in marks:
        mark.wait()


@pytest.mark.parametrize("devices", SPLITS)
def test_batches_in_flight_arrive_as_from_one_stage(folder: Path, devices: list[torch.device]) -> None:
    config = split_config(folder)
    several, one = Target(config, devices), Target(config, [FIRST])
    assert len({stage.stream for stage in several.model.stages}) == len(devices)
    for _ in range(20):
        for start in range(0, len(BATCHES) - len(devices), len(devices)):
            batches = [make_batch(*batch) for batch in BATCHES[start : start + len(devices) + 1]]
            with no_waiting():
                launched = [several.launch(number, rows) for number, rows in enumerate(batches)]
            for rows, (marks, staging, slot) in zip(batches, launched, strict=True):
                wait(marks)
                expected_marks, expected_staging, expected = one.launch(0, rows)
                wait(expected_marks)
                assert torch.equal(slot.hidden_states, expected.hidden_states)
                assert staging.checksum() == expected_staging.checksum() == int(checksum(slot.hidden_states))


@TWO_GPUS
def test_the_second_gpu_works_on_a_batch_while_the_first_works_on_the_next(folder: Path) -> None:
    """The second one sleeps: the first one finishes its part of three batches meanwhile."""
    target, one = Target(split_config(folder), [FIRST, SECOND]), Target(split_config(folder), [FIRST])
    batches = [make_batch(*batch) for batch in BATCHES[:3]]
    for number, rows in enumerate(batches):
        wait(target.launch(number, rows)[0])
    with torch.cuda.device(SECOND):
        torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: two seconds
    launched = [target.launch(number, rows) for number, rows in enumerate(batches)]
    began = time.monotonic()
    torch.cuda.synchronize(FIRST)
    assert not any(marks[1].reached() for marks, _, _ in launched), f"first GPU done after {time.monotonic() - began:.3f} s"
    for rows, (marks, _, slot) in zip(batches, launched, strict=True):
        wait(marks)
        expected_marks, _, expected = one.launch(0, rows)
        wait(expected_marks)
        assert torch.equal(slot.hidden_states, expected.hidden_states)


@TWO_GPUS
def test_weights_are_read_to_the_gpu_of_their_stage_and_nothing_of_accelerate_is_left(folder: Path) -> None:
    config = split_config(folder)
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, random_init=False))
    model, one = TargetModel.load(config, FIRST, SECOND), TargetModel.load(config, FIRST)
    for stage in model.stages:
        layers: Any = model.decoder.layers
        assert {parameter.device for layer in stage.layers for parameter in layers[layer].parameters()} == {stage.device}
    assert not any(hasattr(module, "_hf_hook") for module in model.decoder.modules())
    input_ids = torch.arange(2 * 100, device=FIRST).view(2, 100)
    for tap, expected in zip(model.forward(input_ids), one.forward(input_ids), strict=True):
        assert torch.equal(tap.to(FIRST), expected)


@pytest.mark.parametrize("devices", SPLITS)
def test_compiled_stages_give_the_same_bits_as_one_compiled_stage(folder: Path, devices: list[torch.device]) -> None:
    config, rows = split_config(folder), make_batch(*BATCHES[0])
    several, one = Target(config, devices, compiled=True), Target(config, [FIRST], compiled=True)
    with no_waiting(), torch.compiler.set_stance("fail_on_recompile"):
        marks, _, slot = several.launch(1, rows)
    wait(marks)
    expected_marks, _, expected = one.launch(0, rows)
    wait(expected_marks)
    assert torch.equal(slot.hidden_states, expected.hidden_states)


@TWO_GPUS
def test_weights_that_fit_on_no_gpu_are_refused_with_the_layers_that_do(folder: Path) -> None:
    total = torch.cuda.mem_get_info(SECOND)[1]
    torch.cuda.set_per_process_memory_fraction(2**20 / total, SECOND)
    try:
        with pytest.raises(ConfigError, match=r"targets\.devices: needed .* GiB on cuda:1: room for 0 layers"):
            TargetModel.load(split_config(folder), FIRST, SECOND)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, SECOND)
