"""The warm-up on a CPU: the staging buffers, and one small forward."""

import time
from pathlib import Path

import pytest
import torch

from common.actor.lifecycle import StoppedError
from common.actor.messages import BatchShape
from common.ring.layout import SlotLayout
from services.target.model import TargetModel
from services.target.rows import make_rows
from services.target.warmup import WarmUp, shapes_between
from tests.builders.whole_models import CPU, make_config, make_folder

SHAPES = [BatchShape(4, 16), BatchShape(3, 8), BatchShape(1, 16)]


@pytest.fixture
def warm_up(tmp_path: Path) -> tuple[TargetModel, WarmUp]:
    make_folder("llama", tmp_path)
    config = make_config(tmp_path, [1, 3])
    model = TargetModel.load(config, CPU)
    return model, WarmUp(model, SlotLayout.of(config), config.plan)


def test_the_smallest_shape_runs_and_every_buffer_is_made(warm_up: tuple[TargetModel, WarmUp]) -> None:
    model, subject = warm_up
    seen: list[torch.Size] = []
    model.decoder.get_input_embeddings().register_forward_hook(lambda module, ids, _: seen.append(ids[0].shape))
    stagings = subject.run(SHAPES, lambda: None)
    assert seen == [(1, 16)]
    assert len(stagings) == 2
    tokens = [torch.arange(16).numpy()] * 4
    for staging in stagings:  # the largest batch
        model.run(staging.upload(make_rows(tokens, tokens, range(4), 16)), staging.keep)
        assert staging.hidden_states().shape == (64, 2, 32)


def test_the_slow_layer_of_a_split_target_gets_a_stage_of_its_own(tmp_path: Path) -> None:
    make_folder("llama", tmp_path)
    config = make_config(tmp_path, [1, 4])
    model, one = TargetModel.load(config, CPU, CPU), TargetModel.load(config, CPU)
    model.decoder.layers[4].mlp.register_forward_hook(lambda *_: time.sleep(0.5))  # type: ignore[index, union-attr]
    assert model.stages[1].layers.start < 4
    stagings = WarmUp(model, SlotLayout.of(config), config.plan).run(SHAPES, lambda: None)
    assert [stage.layers for stage in model.stages] == [range(4), range(4, 5)]
    assert [list(stage.taps) for stage in model.stages] == [[0], [1]]
    assert len(stagings) == 3
    input_ids = torch.arange(18).view(2, 9)
    assert all(map(torch.equal, model.forward(input_ids), one.forward(input_ids)))


def test_shapes_between_stand_for_every_range_of_tokens() -> None:
    shapes = [BatchShape(8, 1024), BatchShape(3, 1000), BatchShape(32, 256)]
    between = shapes_between(shapes, [256, 512, 1024])
    ranges = [shape.num_rows * shape.length // 512 for shape in between]
    assert len(ranges) == len(set(ranges))
    expected = {8 * length // 512 for length in range(520, 1025, 8)} | {3 * length // 512 for length in range(520, 1001, 8)}
    expected |= {32 * length // 512 for length in range(8, 257, 8)}
    assert set(ranges) == expected - {8 * 1024 // 512, 3 * 1000 // 512}
    assert BatchShape(8, 1016) in between


@pytest.mark.parametrize("kind", ["llama", "hybrid in a multimodal wrapper"])
def test_a_touch_runs_the_first_layers_of_every_kind_and_changes_nothing(kind: str, tmp_path: Path) -> None:
    make_folder(kind, tmp_path)
    model = TargetModel.load(make_config(tmp_path, [1, 3]), CPU)
    input_ids = torch.arange(18).view(2, 9)
    expected = model.forward(input_ids)
    ran: list[int] = []
    for number, layer in enumerate(model.decoder.layers):  # type: ignore[arg-type]
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    model.tune(input_ids)
    assert ran == ([0] if kind == "llama" else [0, 1])
    assert all(map(torch.equal, model.forward(input_ids), expected))


def test_a_run_without_batches_warms_nothing_up(warm_up: tuple[TargetModel, WarmUp]) -> None:
    assert len(warm_up[1].run([], lambda: None)) == 2


def test_a_warm_up_can_be_stopped(warm_up: tuple[TargetModel, WarmUp]) -> None:
    def stop() -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        warm_up[1].run(SHAPES, stop)
