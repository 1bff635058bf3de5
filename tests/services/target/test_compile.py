"""Compiled layers of a hybrid target: whole, for all shapes, and shared by the layers of a kind."""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from services.target.model import TargetModel
from tests.builders.whole_models import CPU, VOCABULARY, make_config, make_folder

SHAPES = [(5, 16), (2, 9), (7, 24)]


def make_ids(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(5))


@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_compiled_layers_give_the_same_states_at_every_shape(tmp_path: Path) -> None:
    make_folder("hybrid in a multimodal wrapper", tmp_path)
    config = make_config(tmp_path, [1, 4])
    plain, compiled = (TargetModel.load(config, CPU) for _ in range(2))
    compiled.compile_layers()
    counters.clear()
    compiled.forward(make_ids(3, 7))
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # of five layers of two kinds
    with torch.compiler.set_stance("fail_on_recompile"):
        for shape in SHAPES:
            for tap, expected in zip(compiled.forward(make_ids(*shape)), plain.forward(make_ids(*shape)), strict=True):
                torch.testing.assert_close(tap, expected, rtol=1e-4, atol=1e-6)
