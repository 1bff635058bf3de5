"""Single tensors from safetensors folders, random ones from a seed, and the checksum in transit."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.errors import ModelError
from common.weights import find_embedding, find_head, random_tensor, read_initializer_range, read_tensors

CPU = torch.device("cpu")
TENSORS = {"model.a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4)}


def save_sharded(folder: Path) -> None:
    for number, (name, tensor) in enumerate(TENSORS.items()):
        save_file({name: tensor}, folder / f"part-{number}.safetensors")
    weight_map = {name: f"part-{number}.safetensors" for number, name in enumerate(TENSORS)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_reads_from_a_single_file_in_the_requested_dtype(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    read = read_tensors(tmp_path, ["model.a.weight"], CPU, torch.bfloat16)
    assert list(read) == ["model.a.weight"]
    assert torch.equal(read["model.a.weight"], TENSORS["model.a.weight"].bfloat16())


def test_reads_only_the_shards_that_hold_the_names(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / "part-1.safetensors").unlink()
    assert torch.equal(
        read_tensors(tmp_path, ["model.a.weight"], CPU, torch.float32)["model.a.weight"], TENSORS["model.a.weight"]
    )
    with pytest.raises(ModelError, match=r"part-1\.safetensors: needed a safetensors file with b\.weight"):
        read_tensors(tmp_path, ["b.weight"], CPU, torch.float32)


def test_missing_names_are_all_named(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"needed the tensors x, y, found none"):
        read_tensors(tmp_path, ["x", "b.weight", "y"], CPU, torch.float32)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"needed model\.safetensors or model\.safetensors\.index\.json, found neither"):
        read_tensors(tmp_path, ["x"], CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "found"), [("model.safetensors", "safetensors file"), ("model.safetensors.index.json", "index")]
)
def test_damaged_files_are_named(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelError, match=rf"{name}: needed an? {found}"):
        read_tensors(tmp_path, ["x"], CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_numbers_that_mean_nothing_without_their_scales_are_no_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"b.weight": torch.ones(4).to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelError, match=r"model\.safetensors: needed b\.weight of type F64, F32, F16, BF16, found (I8|F8_E4M3)"
    ):
        read_tensors(tmp_path, ["b.weight"], CPU, torch.float32)


def save_names(folder: Path, *names: str) -> None:
    save_file({name: torch.ones(1) for name in names}, folder / "model.safetensors")


@pytest.mark.parametrize("prefix", ["", "model.", "model.language_model.", "thinker.model."])
def test_the_embedding_is_that_of_the_decoder(tmp_path: Path, prefix: str) -> None:
    """A prediction layer has an embedding of its own, less nested than that of a wrapped decoder, and so may deeper layers."""
    layers = [f"{prefix}layers.{layer}.mlp.weight" for layer in range(3)]
    others = ["mtp.embed_tokens.weight", "mtp.layers.0.mlp.weight", f"{prefix}layers.2.embed_tokens.weight"]
    save_names(tmp_path, f"{prefix}embed_tokens.weight", "not_embed_tokens.weight", *layers, *others)
    assert find_embedding(tmp_path) == f"{prefix}embed_tokens.weight"


def test_the_head_is_that_of_the_decoder(tmp_path: Path) -> None:
    decoder = ["thinker.model.embed_tokens.weight", "thinker.model.layers.0.mlp.weight"]
    save_names(tmp_path, *decoder, "thinker.lm_head.weight", "mtp.lm_head.weight")
    assert find_head(tmp_path) == "thinker.lm_head.weight"
    save_names(tmp_path, *decoder, "lm_head.weight", "mtp.lm_head.weight")
    assert find_head(tmp_path) == "lm_head.weight"
    save_names(tmp_path, *decoder, "mtp.lm_head.weight")
    with pytest.raises(ModelError, match=r"needed a tensor named lm_head\.weight, found none"):
        find_head(tmp_path)
    save_names(tmp_path, "lm_head.weight")
    with pytest.raises(ModelError, match=r"needed a tensor named embed_tokens\.weight, found none"):
        find_embedding(tmp_path)


def test_the_initializer_range_is_looked_up_inside_wrappers(tmp_path: Path) -> None:
    for content, expected in [
        ({}, 0.02),
        ({"initializer_range": 0.5}, 0.5),
        ({"text_config": {"initializer_range": 0.1}}, 0.1),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(content))
        assert read_initializer_range(tmp_path) == expected


def test_a_random_tensor_depends_on_seed_name_and_shape_alone() -> None:
    def make(name: str = "x", shape: tuple[int, ...] = (40, 50), seed: int = 1) -> torch.Tensor:
        return random_tensor(name, shape, 0.02, seed, CPU, torch.float32)

    torch.manual_seed(0)
    first = make()
    torch.manual_seed(1)
    assert torch.equal(make(), first)
    assert torch.equal(random_tensor("x", (40, 50), 0.02, 1, CPU, torch.bfloat16), first.bfloat16())
    for other in (make(name="y"), make(seed=2), make(shape=(50, 40)).view(40, 50)):
        assert (other != first).float().mean() > 0.99


def test_a_random_tensor_has_the_requested_deviation_and_no_pattern() -> None:
    tensor = random_tensor("x", (300, 1000), 0.02, 3, CPU, torch.float32)
    assert abs(tensor.mean().item()) < 4 * 0.02 / math.sqrt(tensor.numel())
    assert tensor.std().item() == pytest.approx(0.02, rel=0.01)
    neighbours = torch.stack([tensor.flatten()[:-1], tensor.flatten()[1:]])
    assert abs(torch.corrcoef(neighbours)[0, 1].item()) < 0.01
    assert torch.linalg.matrix_rank(tensor) == 300


def test_a_random_tensor_does_not_repeat_where_its_chunks_meet() -> None:
    chunk = 1 << 24
    tensor = random_tensor("x", (chunk + 1000,), 1.0, 3, CPU, torch.bfloat16)
    assert (tensor[:1000] != tensor[chunk:]).float().mean() > 0.9
