"""launch.balance on a CPU: both sides are measured, and the printed number is one that a run takes."""

import re
from pathlib import Path

import pytest
import torch

from common.actor.messages import BatchShape
from common.config import load
from common.ring.layout import SlotLayout
from launch import balance
from services.target.model import TargetModel
from services.target.staging import Staging
from tests.builders.whole_models import CPU, KINDS, VOCABULARY, make_config, make_folder

TINY = Path(__file__).parents[2] / "launch/configs/tiny.toml"


def test_the_printed_number_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert balance.main([str(TINY)]) == 0
    found = re.search(
        r"^a target makes +([\d,]+) tokens/s, 2 of them .*^anchors_per_batch = (\d+)$", capsys.readouterr().out, re.M | re.S
    )
    assert found is not None
    assert int(found[1].replace(",", "")) > 0
    anchors = int(found[2])
    assert anchors % 32 == 0
    assert 32 <= anchors <= 256
    assert load(TINY, [f"train.anchors_per_batch={anchors}"]).num_anchors == anchors


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert balance.main([str(TINY), "--set", "train.anchors_per_batch=auto"]) == 2
    assert re.fullmatch(r"error: .*anchors_per_batch.*\n", capsys.readouterr().err)


@pytest.mark.parametrize("kind", KINDS)
def test_every_shape_of_the_epoch_runs_once_with_all_sorts_of_tokens(kind: str, tmp_path: Path) -> None:
    make_folder(kind, tmp_path)
    config = make_config(tmp_path, [1, 3])
    model = TargetModel.load(config, CPU)
    seen: list[torch.Tensor] = []
    model.decoder.get_input_embeddings().register_forward_hook(lambda module, ids, _: seen.append(ids[0].clone()))
    shapes = [BatchShape(4, 16, 3), BatchShape(3, 8, 0), BatchShape(2, 8, 1)]
    assert balance.measure_speed(model, Staging(SlotLayout.of(config), model.stages), shapes) > 0
    assert [tuple(ids.shape) for ids in seen] == [(4, 16), (2, 8)]
    assert len(set(seen[0].flatten().tolist())) > 24
    assert int(seen[0].min()) >= 0 and int(seen[0].max()) < VOCABULARY
