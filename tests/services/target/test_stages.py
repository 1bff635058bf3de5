"""A target in several stages gives the bits of one on one device: taps, slots and checksums.

B rows, S padded length, K taps, H hidden size.
"""

import itertools
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from common.actor.messages import BatchShape
from common.config import Config
from common.errors import ConfigError
from common.ring import memory
from common.ring.checksum import checksum
from common.ring.layout import SlotLayout
from common.ring.ring import RingWriter
from services.target.model import TargetModel
from services.target.rows import make_rows
from services.target.stages import make_stages, split, split_by_bytes
from services.target.warmup import WarmUp
from tests.builders.whole_models import CPU, EXPERTS, KINDS, SHAPE, VOCABULARY, make_config, make_folder

MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
SLIDING, EXPERTS_ONLY = "sliding window", "experts"
SHAPES = [(2, 11), (1, 3), (3, 16), (2, 11), (1, 16), (3, 5)]


def make_any_folder(kind: str, folder: Path) -> Path:
    torch.manual_seed(3)
    if kind == SLIDING:
        MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=4)).save_pretrained(folder)
    elif kind == EXPERTS_ONLY:
        sizes = {key: value for key, value in EXPERTS.items() if not key.startswith("shared")}
        Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **sizes)).save_pretrained(folder)
    else:
        make_folder(kind, folder)
    return folder


def make_ids(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_layers_and_taps_are_cut_into_consecutive_stages() -> None:
    stages = make_stages([CPU] * 3, [0, 2, 3], [0, 3, 6])
    assert [stage.layers for stage in stages] == [range(2), range(2, 3), range(3, 7)]
    assert [list(stage.taps) for stage in stages] == [[0], [], [1, 2]]


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("kind", [*KINDS, SLIDING, EXPERTS_ONLY])
def test_taps_are_those_of_one_device(kind: str, num_stages: int, tmp_path: Path) -> None:
    """Over batches of many shapes, whose buffers are reused; masks and rotary angles go over with the hidden states."""
    config = make_config(make_any_folder(kind, tmp_path), [1, 3, 4])
    one, several = TargetModel.load(config, CPU), TargetModel.load(config, *[CPU] * num_stages)
    for shape in SHAPES:
        ids = make_ids(*shape)
        assert all(map(torch.equal, several.forward(ids), one.forward(ids)))


@pytest.mark.parametrize("random_init", [False, True])
def test_taps_do_not_depend_on_where_it_is_cut(tmp_path: Path, random_init: bool) -> None:
    config = make_config(make_any_folder("qwen3", tmp_path), [0, 4], random_init=random_init)
    one, several = TargetModel.load(config, CPU), TargetModel.load(config, CPU, CPU, CPU)
    expected = one.forward(make_ids(2, 9))
    for first, second in itertools.combinations(range(1, 5), 2):
        several.assign([CPU] * 3, [0, first, second])
        entered: list[int] = []
        taps: list[torch.Tensor] = []
        several.run(make_ids(2, 9), lambda _, tap, taps=taps: taps.append(tap), entered.append)  # type: ignore[misc]
        assert entered == [1, 2]
        assert all(map(torch.equal, taps, expected))


def test_a_stage_gets_copies_and_not_what_the_stage_before_goes_on_with(tmp_path: Path) -> None:
    """Wherever a stage's input lies, it must not be memory that the stage before uses for the next batch."""
    config = make_config(make_any_folder("llama", tmp_path), [4])
    model = TargetModel.load(config, CPU, CPU)
    made: list[torch.Tensor] = []
    given: list[torch.Tensor] = []
    first = model.stages[1].layers.start
    layers = list(model.decoder.layers)  # type: ignore[arg-type]
    layers[first - 1].register_forward_hook(lambda _, __, output: made.append(output))
    layers[first].register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
    for _ in range(4):
        model.forward(make_ids(2, 9))
    addresses = [tensor.data_ptr() for tensor in given]
    assert not {tensor.data_ptr() for tensor in made} & set(addresses)
    assert len(set(addresses[:3])) == 3  # a buffer for each batch in flight, and one more
    assert addresses[3] == addresses[0]


def test_nothing_of_a_batch_is_held_when_it_is_launched(tmp_path: Path) -> None:
    model = TargetModel.load(make_config(make_any_folder("llama", tmp_path), [4]), CPU, CPU)
    outputs: list[weakref.ref[torch.Tensor]] = []
    layers: Any = model.decoder.layers
    for layer in layers:
        layer.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output)), prepend=True)
    model.run(make_ids(2, 9), lambda tap_index, tap: None)
    assert [output() for output in outputs] == [None] * 5


@pytest.mark.parametrize("kind", [*KINDS, SLIDING, EXPERTS_ONLY, "another final norm"])
def test_a_stage_reads_nothing_of_the_device_before(kind: str, tmp_path: Path) -> None:
    """The last layers lie on the device `meta`, which computes nothing and refuses tensors of another device."""
    if kind == "another final norm":
        shape = {key: value for key, value in SHAPE.items() if key != "head_dim"}
        BambaForCausalLM(BambaConfig(**shape, **MAMBA, attn_layer_indices=[1])).save_pretrained(tmp_path)
    else:
        make_any_folder(kind, tmp_path)
    config = make_config(tmp_path, [1, 4])
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="bfloat16"))
    model = TargetModel.load(config, CPU)
    model.assign([CPU, torch.device("meta")], [0, 2])
    assert [tap.device.type for tap in model.forward(make_ids(2, 9))] == ["cpu", "meta"]


def test_a_forward_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    config = make_config(make_any_folder("qwen3", tmp_path), [1, 4])
    model = TargetModel.load(config, CPU, CPU)
    expected = model.forward(make_ids(2, 9))

    def fail(tap_index: int, tap: torch.Tensor) -> None:
        raise torch.OutOfMemoryError

    for _ in range(4):
        with pytest.raises(torch.OutOfMemoryError):
            model.run(make_ids(2, 9), fail)
    assert all(map(torch.equal, model.forward(make_ids(2, 9)), expected))


def fill_slots(config: Config, num_stages: int) -> list[tuple[torch.Tensor, int]]:
    """Return bytes and checksum of the slots of three batches."""
    layout = SlotLayout.of(config)
    model = TargetModel.load(config, *[CPU] * num_stages)
    stagings = WarmUp(model, layout, config.plan).run([BatchShape(2, 8)], lambda: None)  # which cuts the stages anew
    assert len(stagings) == num_stages + 1
    writer = RingWriter(memory.create("ring", layout.ring_bytes(3)), layout, 3)
    filled = []
    for number, lengths in enumerate(([5, 12, 1], [16], [3, 2])):
        tokens = [make_ids(length).numpy() for length in lengths]
        rows = make_rows(tokens, tokens, range(len(lengths)), max(lengths))
        staging = stagings[number % len(stagings)]
        slot = writer.open(number, len(rows.token_index), len(lengths))
        slot.hidden_states.fill_(7)
        model.run(staging.upload(rows), staging.keep, staging.enter)
        for mark in staging.copy_to(slot):
            mark.wait()
        assert staging.checksum() == int(checksum(slot.hidden_states))
        assert [laps_s.keys() for laps_s in staging.laps_s()] == [{"upload_s", "forward_s", "pack_s", "copy_s"}] * num_stages
        filled.append((slot.hidden_states.clone(), staging.checksum()))
    return filled


@pytest.mark.parametrize("kind", ["qwen3", "hybrid with experts", "hybrid in a multimodal wrapper", EXPERTS_ONLY])
def test_slots_and_checksums_are_those_of_one_device(kind: str, tmp_path: Path) -> None:
    config = make_config(make_any_folder(kind, tmp_path), [1, 2, 4])
    ring = msgspec.structs.replace(config.ring, layout="split")
    expected = fill_slots(msgspec.structs.replace(config, ring=ring), 1)
    for num_stages in (2, 3, 5):
        targets = msgspec.structs.replace(config.targets, devices=["+".join(["cpu"] * num_stages)])
        found = fill_slots(msgspec.structs.replace(config, targets=targets), num_stages)
        for (hidden_states, total), (same, same_total) in zip(found, expected, strict=True):
            assert torch.equal(hidden_states, same)
            assert total == same_total


@pytest.mark.parametrize(
    ("costs", "num_bytes", "rooms", "first_layers"),
    [
        ([1, 1, 1, 1], [1, 1, 1, 1], [4, 4], [0, 2]),
        ([3, 1, 1, 1], [1, 1, 1, 1], [4, 4], [0, 1]),
        ([1, 1, 1, 4], [1, 1, 1, 1], [4, 4, 4], [0, 1, 3]),
        ([1, 1, 1, 1], [1, 1, 1, 1], [1, 4], [0, 1]),
        ([1, 1, 1, 1], [1, 1, 1, 1], [4, 1], [0, 3]),
        ([1, 1, 1, 1], [1, 1, 1, 1], [1, 2], None),
        ([1, 1], [1, 1], [4, 4, 4], None),
    ],
)
def test_the_slowest_stage_is_as_fast_as_memory_allows(
    costs: list[float], num_bytes: list[int], rooms: list[float], first_layers: list[int] | None
) -> None:
    assert split(costs, num_bytes, rooms) == first_layers


def test_the_split_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        costs = torch.rand(8, generator=generator).tolist()

        def slowest(first_layers: list[int], costs: list[float] = costs) -> float:
            return max(sum(costs[first:end]) for first, end in itertools.pairwise([*first_layers, len(costs)]))

        found = split(costs, [1] * 8, [8] * 3)
        assert found is not None
        assert slowest(found) == pytest.approx(min(slowest([0, *cut]) for cut in itertools.combinations(range(1, 8), 2)))


def test_weights_that_do_not_fit_are_refused_with_the_layers_that_do() -> None:
    gib = 2**30
    found = r"targets\.devices: needed 12\.0 GiB for the weights of 6 layers, found 5\.0 GiB on cpu, 3\.0 GiB on cpu: "
    with pytest.raises(ConfigError, match=found + "room for 3 layers$"):
        split_by_bytes([2 * gib] * 6, [CPU, CPU], [5 * gib, 3 * gib])
    assert split_by_bytes([2 * gib] * 6, [CPU, CPU], [9 * gib, 5 * gib]) == [0, 4]


def test_every_layer_is_timed_and_the_hooks_are_gone(tmp_path: Path) -> None:
    model = TargetModel.load(make_config(make_any_folder("qwen3", tmp_path), [4]), CPU, CPU)
    layers: Any = model.decoder.layers

    def count_hooks() -> list[int]:
        return [len(layer._forward_hooks) + len(layer._forward_pre_hooks) for layer in layers]

    before = count_hooks()
    seconds = model.time_layers(make_ids(2, 9))
    assert len(seconds) == 5
    assert min(seconds) > 0
    assert count_hooks() == before
