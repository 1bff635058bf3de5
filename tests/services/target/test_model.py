"""The target up to its last tap: the same hidden states as the whole model, whatever stands in the padding."""

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from common import config as configuration
from common.errors import ModelError
from services.drafter.model.frozen import load_embedding_and_head
from services.target.architecture import layer_kinds
from services.target.model import TargetModel
from tests.builders.whole_models import CPU, KINDS, SHAPE, VOCABULARY, make_config, make_folder

READ_BACK = {"_local_scalar_dense", "item", "is_nonzero", "nonzero"}  # what waits for a GPU


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A whole random model, and the folder it was saved in."""
    folder = tmp_path_factory.mktemp("model")
    return make_folder(request.param, folder), folder


def run(folder: Path, tap_layers: list[int], input_ids: torch.Tensor) -> list[torch.Tensor]:
    return TargetModel.load(make_config(folder, tap_layers), CPU).forward(input_ids)


def make_ids(*shape: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(5))


def test_taps_are_the_hidden_states_of_the_whole_model(whole: tuple[PreTrainedModel, Path]) -> None:
    model, folder = whole
    input_ids = make_ids(2, 11)
    expected = model(input_ids=input_ids, output_hidden_states=True, use_cache=False).hidden_states
    taps = run(folder, [0, 1, 3], input_ids)
    for tap, layer in zip(taps, [0, 1, 3], strict=True):
        assert torch.equal(tap, expected[layer + 1])


def test_the_last_layer_is_tapped_before_the_final_norm(whole: tuple[PreTrainedModel, Path]) -> None:
    """hidden_states[-1] of transformers is after the norm, which the tap must not be."""
    model, folder = whole
    input_ids = make_ids(1, 7)
    expected = model(input_ids=input_ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
    [tap] = run(folder, [4], input_ids)
    norm = next(module for name, module in model.named_modules() if name.endswith("model.norm"))
    assert not torch.equal(tap, expected)
    assert torch.equal(norm(tap), expected)


@pytest.mark.parametrize("padding", [0, 1, VOCABULARY - 1])
def test_padded_rows_equal_each_document_alone(whole: tuple[PreTrainedModel, Path], padding: int) -> None:
    _, folder = whole
    model = TargetModel.load(make_config(folder, [1, 3]), CPU)
    lengths = [5, 12, 1]
    input_ids = torch.full((3, 12), padding)
    for row, length in zip(input_ids, lengths, strict=True):
        row[:length] = make_ids(length)
    together = model.forward(input_ids)
    for index, length in enumerate(lengths):
        for tap, alone in zip(together, model.forward(input_ids[index : index + 1, :length]), strict=True):
            torch.testing.assert_close(tap[index, :length], alone[0], rtol=1e-5, atol=1e-6)


def test_what_comes_after_the_last_tap_is_never_read(whole: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    _, folder = whole
    input_ids = make_ids(2, 9)
    expected = run(folder, [0, 2], input_ids)
    shutil.copytree(folder, tmp_path / "cut")
    path = tmp_path / "cut" / "model.safetensors"
    kept = {
        name: tensor for name, tensor in load_file(path).items() if not any(part in name for part in (".3.", ".4.", "lm_head"))
    }
    save_file(kept, path, {"format": "pt"})
    model = TargetModel.load(make_config(tmp_path / "cut", [0, 2]), CPU)
    assert all(map(torch.equal, model.forward(input_ids), expected))
    assert len(model.decoder.layers) == 3  # type: ignore[arg-type]


def test_the_taps_carry_no_graph_and_repeat(whole: tuple[PreTrainedModel, Path]) -> None:
    _, folder = whole
    model = TargetModel.load(make_config(folder, [1]), CPU)
    [first], [again] = model.forward(make_ids(1, 6)), model.forward(make_ids(1, 6))
    assert torch.equal(first, again)
    assert not first.requires_grad
    assert not any(parameter.requires_grad for parameter in model.decoder.parameters())


def test_random_weights_do_not_depend_on_where_the_model_is_cut(whole: tuple[PreTrainedModel, Path]) -> None:
    _, folder = whole
    input_ids = make_ids(2, 9)
    short = TargetModel.load(make_config(folder, [0], random_init=True), CPU)
    long = TargetModel.load(make_config(folder, [0, 4], random_init=True), CPU)
    assert torch.equal(short.forward(input_ids)[0], long.forward(input_ids)[0])
    other = TargetModel.load(make_config(folder, [0], random_init=True, seed=1), CPU)
    assert not torch.equal(short.forward(input_ids)[0], other.forward(input_ids)[0])


def test_random_weights_leave_the_computed_buffers_right(whole: tuple[PreTrainedModel, Path]) -> None:
    _, folder = whole
    read = dict(TargetModel.load(make_config(folder, [1]), CPU).decoder.named_buffers())
    made = dict(TargetModel.load(make_config(folder, [1], random_init=True), CPU).decoder.named_buffers())
    assert "rotary_emb.inv_freq" in read
    assert read.keys() == made.keys()
    assert all(torch.equal(read[name], made[name]) for name in read)


def test_random_norms_are_one_and_the_states_stay_finite(whole: tuple[PreTrainedModel, Path]) -> None:
    _, folder = whole
    model = TargetModel.load(make_config(folder, [4], random_init=True), CPU)
    norms = [tensor for name, tensor in model.decoder.named_parameters() if "layernorm" in name]
    assert len(norms) == 10
    assert all((norm == 1).all() for norm in norms)
    assert model.forward(make_ids(2, 9))[0].isfinite().all()


@pytest.mark.parametrize("random_init", [False, True])
def test_target_and_drafter_have_the_same_embedding_and_head(whole: tuple[PreTrainedModel, Path], random_init: bool) -> None:
    model, folder = whole
    config = make_config(folder, [1], random_init=random_init)
    embedding, head = load_embedding_and_head(config, CPU)
    assert torch.equal(embedding, TargetModel.load(config, CPU).decoder.get_input_embeddings().weight)  # type: ignore[arg-type]
    assert (head is embedding) == config.shape.tie_word_embeddings
    if not random_init:
        assert torch.equal(head, model.lm_head.weight)
    elif head is not embedding:
        assert (head != embedding).float().mean() > 0.99
    half = msgspec.structs.replace(config, draft=msgspec.structs.replace(config.draft, dtype="bfloat16"))
    assert torch.equal(load_embedding_and_head(half, CPU)[1], head.bfloat16())


def test_the_first_layer_must_read_the_embedding_times_the_scale_of_the_configuration(tmp_path: Path) -> None:
    GraniteForCausalLM(GraniteConfig(**SHAPE, embedding_multiplier=12.0)).save_pretrained(tmp_path / "granite")
    Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE)).save_pretrained(tmp_path / "gemma")
    for name, scale in (("granite", 12.0), ("gemma", SHAPE["hidden_size"] ** 0.5)):
        for dtype in ("float32", "bfloat16"):
            config = make_config(tmp_path / name, [1])
            config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype=dtype))
            assert config.shape.embedding_scale == scale
            TargetModel.load(config, CPU)
            other = msgspec.structs.replace(config.shape, embedding_scale=scale * 1.05)
            with pytest.raises(ModelError, match=f"first layer reads its embedding times {scale * 1.05:g}, found {name}"):
                TargetModel.load(msgspec.structs.replace(config, target_shape=other), CPU)


def test_the_tiny_target_of_the_repository_loads() -> None:
    config = configuration.load(Path("launch/configs/tiny.toml"), [])
    taps = TargetModel.load(config, CPU).forward(torch.zeros(1, 3, dtype=torch.int64))
    assert [tap.shape for tap in taps] == [(1, 3, config.shape.hidden_size)] * len(config.draft.tap_layers)


class Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations that are called in the block, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.called: dict[str, list[tuple[Any, ...]]] = {}

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), settings: Any = None) -> Any:
        self.called.setdefault(operation.overloadpacket.__name__, []).append(arguments)
        return operation(*arguments, **(settings or {}))


def attention_calls(operations: Operations) -> set[tuple[Any, ...]]:
    """Return mask, dropout and causality of every call."""
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
