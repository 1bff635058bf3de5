"""The target up to its last tap: the same hidden states as the whole model, whatever stands in the padding."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from common import config as configuration
from common.config import ActorsConfig, Config, DataConfig, DraftConfig, ModelConfig, PlanConfig, SyntheticConfig
from common.errors import ModelError
from common.target_shape import read_target_shape
from services.drafter.frozen import load_embedding_and_head
from services.target.model import TargetModel

CPU = torch.device("cpu")
VOCABULARY = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
}
HYBRID = SHAPE | {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
}
EXPERTS: dict[str, Any] = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}


def make_model(kind: str) -> PreTrainedModel:
    match kind:
        case "llama":
            return LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=True))
        case "qwen3":
            return Qwen3ForCausalLM(Qwen3Config(**SHAPE, sliding_window=None))
        case "hybrid with experts":
            return Qwen3NextForCausalLM(Qwen3NextConfig(**HYBRID, **EXPERTS))
        case "multimodal":
            return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=SHAPE | ROPE, vision_config=VISION))
        case "hybrid in a multimodal wrapper":
            return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=HYBRID, vision_config=VISION))
    raise AssertionError(kind)


KINDS = ["llama", "qwen3", "multimodal", "hybrid with experts", "hybrid in a multimodal wrapper"]


@pytest.fixture(scope="module", params=KINDS)
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """A whole random model, and the folder it was saved in."""
    torch.manual_seed(3)
    model = make_model(request.param).train(False).requires_grad_(False)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    return model, folder


def make_config(folder: Path, tap_layers: list[int], *, random_init: bool = False, seed: int = 0) -> Config:
    return Config(
        seed=seed,
        model=ModelConfig(path=str(folder), random_init=random_init, dtype="float32"),
        draft=DraftConfig(mask_token_id=VOCABULARY - 1, tap_layers=tap_layers, dtype="float32"),
        data=DataConfig(synthetic=SyntheticConfig(num_samples=1, num_eval_samples=1, min_length=2, max_length=2)),
        plan=PlanConfig(bucket_lengths=[16], max_tokens_per_batch=64, batches_per_step=1),
        targets=ActorsConfig(devices=["cpu"]),
        drafters=ActorsConfig(devices=["cpu"]),
        target_shape=read_target_shape(folder),
    )


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
    for place, length in enumerate(lengths):
        for tap, alone in zip(together, model.forward(input_ids[place : place + 1, :length]), strict=True):
            torch.testing.assert_close(tap[place, :length], alone[0], rtol=1e-5, atol=1e-6)


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


def test_the_tiny_target_of_the_repository_loads() -> None:
    config = configuration.load(Path("launch/configs/tiny.toml"), [])
    taps = TargetModel.load(config, CPU).forward(torch.zeros(1, 3, dtype=torch.int64))
    assert [tap.shape for tap in taps] == [(1, 3, config.shape.hidden_size)] * len(config.draft.tap_layers)


@pytest.fixture
def llama_folder(tmp_path: Path) -> Path:
    make_model("llama").save_pretrained(tmp_path / "llama")
    return tmp_path / "llama"


def test_a_missing_folder_is_named(llama_folder: Path) -> None:
    config = make_config(llama_folder, [1])
    shutil.rmtree(llama_folder)
    with pytest.raises(ModelError, match=r"model\.path: needed a model folder with config\.json, found none in .*llama"):
        TargetModel.load(config, CPU)


def test_missing_weights_are_named(llama_folder: Path) -> None:
    (llama_folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"llama: needed model\.safetensors or .*, found neither"):
        TargetModel.load(make_config(llama_folder, [1]), CPU)
    with pytest.raises(ModelError, match=r"llama: needed model\.safetensors or .*, found neither"):
        load_embedding_and_head(make_config(llama_folder, [1]), CPU)


def test_a_missing_tensor_is_named(llama_folder: Path) -> None:
    path = llama_folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"needed the tensors layers\.1\.mlp\.up_proj\.weight, found none"):
        TargetModel.load(make_config(llama_folder, [1]), CPU)


def test_a_tensor_of_another_shape_is_an_error(llama_folder: Path) -> None:
    path = llama_folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"model.embed_tokens.weight": torch.ones(3, 32)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match="llama: llama cannot be loaded"):
        TargetModel.load(make_config(llama_folder, [1]), CPU)
    with pytest.raises(ModelError, match=r"needed model\.embed_tokens\.weight \[96, 32\], found \[3, 32\]"):
        load_embedding_and_head(make_config(llama_folder, [1]), CPU)


@pytest.mark.parametrize("num_bytes", [0, 100, 4000])
def test_a_truncated_file_is_named(llama_folder: Path, num_bytes: int) -> None:
    path = llama_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ModelError, match=r"llama.*(needed a safetensors file|cannot be loaded)"):
        TargetModel.load(make_config(llama_folder, [1]), CPU)


def test_a_shard_that_is_missing_or_damaged_is_an_error(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path / "llama", max_shard_size="20KB")
    shards = sorted((tmp_path / "llama").glob("model-*.safetensors"))
    assert len(shards) > 2
    config = make_config(tmp_path / "llama", [4])
    shards[1].write_bytes(shards[1].read_bytes()[:-1])
    with pytest.raises(ModelError, match="llama cannot be loaded"):
        TargetModel.load(config, CPU)
    shards[1].unlink()
    with pytest.raises(ModelError, match="llama cannot be loaded"):
        TargetModel.load(config, CPU)


def test_weights_in_the_dtype_of_the_file_are_its_pages_and_no_copy(llama_folder: Path) -> None:
    """Targets of a node share what they read; a private copy each would need five times the memory."""
    model = TargetModel.load(make_config(llama_folder, [4]), CPU)
    embedding = model.decoder.get_input_embeddings().weight
    assert isinstance(embedding, torch.Tensor)
    [file] = [line for line in Path("/proc/self/maps").read_text().splitlines() if holds(line, embedding.data_ptr())]
    assert file.endswith(str(llama_folder / "model.safetensors"))


def holds(mapping: str, address: int) -> bool:
    first, last = (int(bound, 16) for bound in mapping.split()[0].split("-"))
    return first <= address < last


def test_weights_take_the_dtype_that_is_configured(whole: tuple[PreTrainedModel, Path]) -> None:
    _, folder = whole
    config = make_config(folder, [1])
    half = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype="bfloat16"))
    exact, rounded = (dict(TargetModel.load(each, CPU).decoder.named_parameters()) for each in (config, half))
    assert exact.keys() == rounded.keys()
    assert all(torch.equal(rounded[name], exact[name].bfloat16()) for name in exact)


def test_an_unknown_architecture_is_named(llama_folder: Path) -> None:
    config = make_config(llama_folder, [1])
    path = llama_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "unheard-of"}))
    with pytest.raises(ModelError, match=r"needed an architecture that transformers knows, found: .*unheard-of"):
        TargetModel.load(config, CPU)


def test_a_model_without_a_list_of_layers_is_named(llama_folder: Path, tmp_path: Path) -> None:
    config = make_config(llama_folder, [1])
    GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=32, n_head=2, vocab_size=VOCABULARY)).save_pretrained(tmp_path / "gpt2")
    model = ModelConfig(path=str(tmp_path / "gpt2"), random_init=True, dtype="float32")
    with pytest.raises(ModelError, match="needed a decoder with a list `layers`, found GPT2Model"):
        TargetModel.load(msgspec.structs.replace(config, model=model), CPU)
