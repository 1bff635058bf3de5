"""The speed of a target: over the batches of an epoch, with tokens as various as those of a run."""

from pathlib import Path

import pytest
import torch

from common.actor.lifecycle import StoppedError
from common.actor.messages import BatchShape
from common.ring.layout import SlotLayout
from services.target.model import TargetModel
from services.target.speed import measure_speed
from services.target.staging import Staging
from tests.builders.whole_models import CPU, KINDS, VOCABULARY, make_config, make_folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_of_the_epoch_runs_once_with_all_sorts_of_tokens(kind: str, tmp_path: Path) -> None:
    make_folder(kind, tmp_path)
    config = make_config(tmp_path, [1, 3])
    model = TargetModel.load(config, CPU)
    seen: list[torch.Tensor] = []
    model.decoder.get_input_embeddings().register_forward_hook(lambda module, ids, _: seen.append(ids[0].clone()))
    shapes = [BatchShape(4, 16, 3), BatchShape(3, 8, 0), BatchShape(2, 8, 1)]
    assert measure_speed(model, Staging(SlotLayout.of(config), CPU), shapes, CPU, lambda: None) > 0
    assert [tuple(ids.shape) for ids in seen] == [(4, 16), (2, 8)]
    assert len(set(seen[0].flatten().tolist())) > 24
    assert seen[0].min() >= 0
    assert seen[0].max() < VOCABULARY


def test_it_can_be_told_to_stop_and_nothing_to_measure_is_no_speed(tmp_path: Path) -> None:
    def stop() -> None:
        raise StoppedError

    make_folder("llama", tmp_path)
    config = make_config(tmp_path, [1, 3])
    model, staging = TargetModel.load(config, CPU), Staging(SlotLayout.of(config), CPU)
    with pytest.raises(StoppedError):
        measure_speed(model, staging, [BatchShape(1, 16, 1)], CPU, stop)
    assert measure_speed(model, staging, [BatchShape(1, 16, 0)], CPU, lambda: None) == 0.0
