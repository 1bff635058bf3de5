"""A target's weights: the tensors that are read, their memory, and the errors of damaged folders."""

import json
import logging
import re
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig

from common.errors import ModelError
from launch.decoding.full_target import load_full_target
from services.drafter.model.frozen import load_embedding_and_head
from services.target.architecture import find_layers
from services.target.model import TargetModel
from tests.builders.whole_models import CPU, KINDS, make_config, make_folder, make_model


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


@pytest.mark.parametrize("part", ["model.layers.0.self_attn.q_proj.weight_scale_inv", "model.embed_tokens.weight_scale"])
def test_a_tensor_that_the_loaded_layers_do_not_know_is_an_error(llama_folder: Path, part: str) -> None:
    path = llama_folder / "model.safetensors"
    tensors = load_file(path)
    others = ["model.layers.2.self_attn.q_proj.weight_scale_inv", "mtp.layers.0.mlp.up_proj.weight"]  # of what is not loaded
    save_file(tensors | {name: torch.ones(1) for name in others}, path, {"format": "pt"})
    TargetModel.load(make_config(llama_folder, [1]), CPU)
    save_file(tensors | {part: torch.ones(1)}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=f"needed tensors that the decoder knows, found {part.removeprefix('model.')}"):
        TargetModel.load(make_config(llama_folder, [1]), CPU)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_weight_of_an_integer_or_float8_type_is_an_error(llama_folder: Path, dtype: torch.dtype) -> None:
    path = llama_folder / "model.safetensors"
    tensors = load_file(path)
    tensors["model.layers.2.mlp.up_proj.weight"] = tensors["model.layers.2.mlp.up_proj.weight"].to(dtype)
    save_file(tensors, path, {"format": "pt"})
    TargetModel.load(make_config(llama_folder, [1]), CPU)
    with pytest.raises(ModelError, match=r"found integers or float8 in model\.layers\.2\.mlp\.up_proj\.weight"):
        TargetModel.load(make_config(llama_folder, [2]), CPU)


def test_a_quantization_that_the_folder_names_is_refused(llama_folder: Path) -> None:
    config, path = make_config(llama_folder, [1]), llama_folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "modelopt"}}))
    with pytest.raises(ModelError, match="in a form known here, found quantization_config modelopt None"):
        TargetModel.load(config, CPU)
    with pytest.raises(ModelError, match="in a form known here, found quantization_config modelopt None"):
        load_full_target(config, CPU)


def test_an_extra_prediction_layer_with_an_embedding_is_not_the_decoder(tmp_path: Path) -> None:
    make_folder("multimodal", tmp_path)
    config, path = make_config(tmp_path, [1]), tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.language_model.embed_tokens.weight"
    extra = {"mtp.embed_tokens.weight": tensors[name] + 1, "mtp.lm_head.weight": tensors["lm_head.weight"] + 1}
    extra["mtp.layers.0.mlp.up_proj.weight"] = tensors["model.language_model.layers.0.mlp.up_proj.weight"] + 1
    save_file(tensors | extra, path, {"format": "pt"})
    embedding, head = load_embedding_and_head(config, CPU)
    assert torch.equal(embedding, tensors[name]) and torch.equal(head, tensors["lm_head.weight"])
    assert torch.equal(TargetModel.load(config, CPU).decoder.get_input_embeddings().weight, embedding)  # type: ignore[arg-type]


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


@pytest.mark.parametrize("kind", KINDS)
def test_weights_take_the_dtype_that_is_configured(kind: str, tmp_path: Path) -> None:
    make_folder(kind, tmp_path)
    config = make_config(tmp_path, [1])
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


def test_every_phase_is_logged(llama_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        TargetModel.load(make_config(llama_folder, [1]), CPU)
    assert re.search(r"architecture llama, 2 of 5 layers, its code imported in \d+\.\d s", caplog.text)
    assert re.search(r"weights read in \d+\.\d s: \d+\.\d\d GiB on cpu", caplog.text)


def test_a_model_without_a_list_of_layers_is_named() -> None:
    decoder = nn.Module()
    decoder.config = LlamaConfig(num_hidden_layers=2)  # type: ignore[assignment]
    decoder.lists = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    with pytest.raises(ModelError, match="needed a decoder with one list of layers, found Module"):
        find_layers(decoder)
