"""Attention of right-padded rows: no mask, nothing read back from the device, and masks kept where windows need them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import MistralConfig, MistralForCausalLM

from services.target.attention import layer_kinds
from services.target.model import TargetModel
from tests.builders.whole_models import CPU, KINDS, SHAPE, make_config, make_folder

READ_BACK = {"_local_scalar_dense", "item", "is_nonzero", "nonzero"}  # what waits for a GPU


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is called in the block, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: dict[str, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        self.called.setdefault(operation.overloadpacket.__name__, []).append(arguments)
        return operation(*arguments, **(settings or {}))


def attention_calls(operations: Operations) -> set[tuple[Any, ...]]:
    """Mask, dropout and causality of every call."""
    return {tuple(arguments[3:6]) for arguments in operations.called["scaled_dot_product_attention"]}


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_causal_without_a_mask_and_nothing_is_read_back(kind: str, tmp_path: Path) -> None:
    make_folder(kind, tmp_path)
    model = TargetModel.load(make_config(tmp_path, [1, 3]), CPU)
    with Operations() as operations:
        model.run(torch.zeros(2, 9, dtype=torch.int64), lambda tap_index, tap: None)
    assert attention_calls(operations) == {(None, 0.0, True)}
    assert not operations.called.keys() & READ_BACK


def test_what_transformers_does_by_itself_would_show(tmp_path: Path) -> None:
    model = make_folder("llama", tmp_path)
    with Operations() as operations, torch.inference_mode():
        model(input_ids=torch.zeros(2, 9, dtype=torch.int64), use_cache=False)
    assert operations.called.keys() & READ_BACK


def test_a_sliding_window_keeps_its_mask(tmp_path: Path) -> None:
    torch.manual_seed(3)
    config = MistralConfig(**SHAPE, sliding_window=4)
    whole = MistralForCausalLM(config).train(False).requires_grad_(False)
    whole.save_pretrained(tmp_path)
    model = TargetModel.load(make_config(tmp_path, [1, 3]), CPU)
    assert layer_kinds(config) == ["sliding_attention"] * 5
    input_ids = torch.arange(20).view(2, 10)
    expected = whole(input_ids=input_ids, output_hidden_states=True, use_cache=False).hidden_states
    with Operations() as operations:
        taps = model.forward(input_ids)
    assert all(mask is not None for mask, *_ in attention_calls(operations))
    assert torch.equal(taps[1], expected[4])
