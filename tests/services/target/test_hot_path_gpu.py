"""The hot path of a target on a GPU: nothing waits, nothing is allocated, the next forward does not wait for a copy.

B rows, S padded length, K taps, H hidden size.
"""

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from common.actor.messages import BatchShape
from common.config import ActorsConfig, Config, DataConfig, ModelConfig, PlanConfig, RingConfig, TargetsConfig
from common.device.copy_stream import Mark
from common.draft_config import DraftConfig
from common.errors import ConfigError
from common.metrics import read_metrics
from common.ring import memory
from common.ring.checksum import checksum
from common.ring.layout import SlotLayout
from common.ring.ring import RingWriter, WritableSlot
from common.target_shape import read_target_shape
from launch.bench.harness.peers import Drain
from launch.bench.harness.stage import Stage
from launch.bench.shapes import random_run
from services.target.model import TargetModel
from services.target.rows import TargetRows, make_rows
from services.target.staging import Staging
from services.target.warmup import WarmUp

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

GPU = torch.device("cuda:0")
NUM_SLOTS = 4
BUCKETS, BUDGET = [256, 1024], 8192
TAPS = [0, 2, 3]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 5, "num_attention_heads": 8, "head_dim": 64}
    LlamaForCausalLM(LlamaConfig(vocab_size=256, num_key_value_heads=4, **shape)).save_pretrained(folder)  # type: ignore[arg-type]
    return folder


def make_config(folder: Path, layout: str = "packed", max_tokens: int = BUDGET) -> Config:
    return Config(
        model=ModelConfig(path=str(folder), random_init=True),
        draft=DraftConfig(mask_token_id=255, tap_layers=TAPS),
        data=DataConfig(),
        plan=PlanConfig(bucket_lengths=BUCKETS, max_tokens_per_batch=max_tokens, batches_per_step=1),
        ring=RingConfig(num_slots=NUM_SLOTS, layout=layout),  # type: ignore[arg-type]
        targets=TargetsConfig(devices=["cuda:0"]),
        drafters=ActorsConfig(devices=["cuda:0"]),
        target_shape=read_target_shape(folder),
    )


def make_batch(lengths: list[int], seed: int) -> TargetRows:
    random = np.random.default_rng(seed)
    tokens = [random.integers(0, 255, length).astype(np.int32) for length in lengths]
    return make_rows(tokens, tokens, range(len(lengths)), max(lengths))


class Half:
    """Model, staging buffers and a registered ring, as in the service; the caller waits for marks."""

    def __init__(self, config: Config, compiled: bool = False) -> None:
        self.layout = SlotLayout.of(config)
        self.model = TargetModel.load(config, GPU)
        if compiled:
            self.model.compile_layers()
        self.shapes = [BatchShape(BUDGET // length, length) for length in BUCKETS] + [BatchShape(3, BUCKETS[0])]
        self.stagings = WarmUp(self.model, self.layout, config.plan).run(self.shapes, lambda: None)
        self.writer = RingWriter(memory.create("ring", self.layout.ring_bytes(NUM_SLOTS)), self.layout, NUM_SLOTS)

    def launch(self, number: int, rows: TargetRows) -> tuple[Mark, Staging, WritableSlot]:
        """Launch everything of a batch, as the launching thread does."""
        staging = self.stagings[number % len(self.stagings)]
        slot = self.writer.open(number % NUM_SLOTS, len(rows.token_index), len(rows.packed.sample_ids))
        self.model.run(staging.upload(rows), staging.keep)
        [mark] = staging.copy_to(slot)
        return mark, staging, slot

    def expected(self, rows: TargetRows) -> torch.Tensor:
        """[T, K, H] by plain indexing."""
        token_index = torch.from_numpy(rows.token_index).to(GPU)
        return torch.stack([tap.flatten(0, 1)[token_index] for tap in self.model.forward(rows.input_ids.to(GPU))], 1)


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("layout", ["packed", "split"])
def test_batches_are_launched_without_waiting_and_arrive_as_they_are(folder: Path, layout: str) -> None:
    half = Half(make_config(folder, layout))
    batches = [make_batch([1000, 17, 1024], 0), make_batch([1, 250, 256, 99], 1), make_batch([700], 2)]
    for pair in (batches[:2], batches[1:], batches[::2]):
        with no_waiting():
            launched = [half.launch(number, rows) for number, rows in enumerate(pair)]
        for rows, (mark, staging, slot) in zip(pair, launched, strict=True):
            mark.wait()
            arrived = slot.hidden_states.transpose(0, 1) if layout == "split" else slot.hidden_states
            assert torch.equal(arrived, half.expected(rows).cpu())
            assert staging.checksum() == int(checksum(slot.hidden_states))
            [laps_s] = staging.laps_s()
            assert {"upload_s", "forward_s", "pack_s", "copy_s"} == laps_s.keys()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_next_forward_is_launched_while_the_batch_before_is_on_its_way(folder: Path, compiled: bool) -> None:
    """At shapes that ran before: CUDA loads a kernel at its first launch, and waits for the device to do so."""
    half = Half(make_config(folder), compiled)
    first, second = make_batch([1024] * 8, 0), make_batch([256] * 30, 1)
    for number, rows in enumerate((first, second)):
        half.launch(number, rows)[0].wait()
    assert half.launch(0, first)[2].hidden_states.is_pinned()  # or the copy itself would be waited for
    torch.cuda.synchronize()
    began = time.monotonic()
    torch.cuda._sleep(4_000_000_000)  # type: ignore[no-untyped-call]  # cycles: two seconds without the first batch
    mark, _, slot = half.launch(0, first)
    between = time.monotonic()
    later, _, later_slot = half.launch(1, second)
    assert not mark.reached(), f"launched in {between - began:.3f} s and {time.monotonic() - between:.3f} s"
    later.wait()
    assert mark.reached()
    assert torch.equal(slot.hidden_states, half.expected(first).cpu())
    assert torch.equal(later_slot.hidden_states, half.expected(second).cpu())


def test_a_used_staging_buffer_is_reused_only_after_its_copy_and_then_right(folder: Path) -> None:
    half = Half(make_config(folder))
    marks: list[Mark] = []
    batches = [make_batch([1024 - number, 100 + number], number) for number in range(NUM_SLOTS)]
    slots = []
    for number, rows in enumerate(batches):
        if number >= len(half.stagings):
            marks[number - len(half.stagings)].wait()
        mark, _, slot = half.launch(number, rows)
        marks.append(mark)
        slots.append(slot)
    marks[-1].wait()
    for rows, slot in zip(batches, slots, strict=True):
        assert torch.equal(slot.hidden_states, half.expected(rows).cpu())


def test_attention_runs_on_the_flash_kernel(folder: Path) -> None:
    """With every other kernel forbidden the forward still runs."""
    half = Half(make_config(folder))
    input_ids = torch.zeros(2, 300, dtype=torch.int64, device=GPU)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        assert all(tap.isfinite().all() for tap in half.model.forward(input_ids))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        half.model.forward(input_ids)
    names = {event.key for event in profile.key_averages()}
    print(sorted(name for name in names if any(part in name for part in ("flash", "fmha", "sdpa", "cudnn"))))
    assert any("flash" in name for name in names)


def test_compiled_layers_give_the_same_states_and_wait_for_nothing(folder: Path) -> None:
    config = make_config(folder)
    rows = make_batch([1000, 17, 1024], 0)
    expected = Half(config).expected(rows)
    half = Half(config, compiled=True)
    with no_waiting(), torch.compiler.set_stance("fail_on_recompile"):
        mark, _, slot = half.launch(1, rows)
    mark.wait()
    torch.testing.assert_close(slot.hidden_states.cuda().float(), expected.float(), rtol=0.05, atol=0.05)


@pytest.fixture
def small_memory() -> Iterator[None]:
    """Leave 256 MiB beside the memory in use, the weights of the small model not counted."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    allowed = torch.cuda.memory_reserved() + 256 * 2**20
    torch.cuda.set_per_process_memory_fraction(allowed / total)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)
    torch.cuda.empty_cache()


def test_a_budget_that_does_not_fit_is_refused_with_the_one_that_does(folder: Path, small_memory: None) -> None:
    def warm_up(max_tokens: int) -> list[Staging]:
        config = make_config(folder, max_tokens=max_tokens)
        shapes = [BatchShape(max_tokens // 1024, 1024), BatchShape(max_tokens // 256, 256)]
        return WarmUp(model, SlotLayout.of(config), config.plan).run(shapes, lambda: None)

    def refuse(max_tokens: int) -> int:
        found = f"max_tokens_per_batch: needed at most (\\d+), all of the .* found {max_tokens}"
        with pytest.raises(ConfigError, match=found) as error:
            warm_up(max_tokens)
        print(error.value)
        return int(str(error.value).split("at most ")[1].split(",")[0])

    model = TargetModel.load(make_config(folder), GPU)
    fitting = refuse(262144)
    assert refuse(262144) == fitting  # what the failed tries held is free again
    assert 2048 <= fitting < 262144
    warm_up(fitting)
    gc.collect()
    torch.cuda.empty_cache()
    assert refuse(2 * fitting) <= 2 * fitting


def test_rows_too_long_for_the_memory_are_refused_with_the_length_that_is_not(folder: Path, small_memory: None) -> None:
    config = make_config(folder, max_tokens=262144)
    plan = msgspec.structs.replace(config.plan, bucket_lengths=[262144])
    model = TargetModel.load(config, GPU)
    with pytest.raises(ConfigError, match=r"plan\.bucket_lengths: needed rows of at most \d+ tokens"):
        WarmUp(model, SlotLayout.of(config), plan).run([BatchShape(1, 262144)], lambda: None)


def test_memory_that_others_hold_does_not_change_the_number_named(folder: Path) -> None:
    """Hold 8 GiB, of which the reserve of three per cent is more than the memory that is left."""
    model = TargetModel.load(make_config(folder), GPU)
    held = torch.empty(8 * 2**30, dtype=torch.uint8, device=GPU)
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**28) / total)
    try:
        config = make_config(folder, max_tokens=262144)
        with pytest.raises(ConfigError, match=r"max_tokens_per_batch: needed at most \d+, all of the") as error:
            WarmUp(model, SlotLayout.of(config), config.plan).run([BatchShape(256, 1024)], lambda: None)
        assert int(str(error.value).split("at most ")[1].split(",")[0]) >= 2048
    finally:
        del held
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_a_real_target_allocates_nothing_after_its_warm_up(folder: Path, compiled: str) -> None:
    """A process of its own, with batches of many lengths; a real exchange; a drafter that takes everything."""
    settings = [
        "data={synthetic={num_samples=600, num_eval_samples=4, min_length=20, max_length=1024}}",
        "plan.bucket_lengths=[128, 512, 1024]",
        "plan.max_tokens_per_batch=8192",
        "plan.max_samples_per_batch=64",
        f"model.path={folder}",
        "draft.tap_layers=[0, 1, 2, 3]",
        "plan.epochs=8",
        f"targets.compile={compiled}",
        "model.dtype=bfloat16",
        'drafters.devices=["cpu"]',
    ]
    with Stage(random_run("tiny", 1024, settings), "test") as stage:
        stage.await_ready(stage.start("exchange"))
        [target] = stage.start("target")
        stage.await_ready([target])
        drain = Drain(stage.run_dir)
        while len(figures := list(read_metrics(stage.run_dir, "target-0"))) < 300:
            stage.check()
            time.sleep(0.1)
        drain.close()
        log = target.log.read_text()
    print(log)
    assert len({line["num_padded_tokens"] for line in figures}) > 20
    assert len({(line["num_device_allocs"], line["reserved_bytes"]) for line in figures}) == 1
