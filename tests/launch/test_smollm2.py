"""SmolLM2 out of its package: the folder that the demo trains for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerBase

from common import config as configuration
from common.data.dataset import Dataset
from common.errors import ModelError
from common.target_shape import default_tap_layers, read_target_shape
from launch import prepare
from launch.data.chat import load_tokenizer, render
from launch.smollm2 import convert, find_gguf
from tests.builders.launched_runs import ROOT
from tests.builders.supervised import read_supervised, read_text

pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def folder(smollm2: Path) -> Path:
    return smollm2


@pytest.fixture(scope="module")
def model(folder: Path) -> LlamaForCausalLM:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM)
    return model


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(folder)


def test_a_folder_that_is_there_is_left_alone(folder: Path) -> None:
    before = (folder / "model.safetensors").stat()
    assert convert(folder) is False
    assert (folder / "model.safetensors").stat() == before


@pytest.mark.full_demo  # the fixture unpacks the package on a new machine; once is enough there
def test_a_file_is_unpacked_like_the_package(folder: Path, tmp_path: Path) -> None:
    assert convert(tmp_path / "model", find_gguf()) is True
    for name in ("config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "model" / name).read_text() == (folder / name).read_text()
    first, second = (
        load_file(path / "model.safetensors")["model.layers.7.mlp.up_proj.weight"] for path in (folder, tmp_path / "model")
    )
    assert torch.equal(first, second)


def test_what_is_no_gguf_file_leaves_nothing_behind(tmp_path: Path) -> None:
    whole = find_gguf().read_bytes()
    for name, content, needed in (("page", b"<html>", "needed a GGUF file"), ("part", whole[: len(whole) // 2], "cut short")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ModelError, match=needed):
            convert(tmp_path / "model", tmp_path / name)
        (tmp_path / name).unlink()
    with pytest.raises(ModelError, match="absent: cannot be read: No such file or directory"):
        convert(tmp_path / "model", tmp_path / "absent")
    assert not list(tmp_path.iterdir())


def test_another_folder_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="needed a new folder, found one that is no model"):
        convert(tmp_path)


def test_the_shape_is_that_of_smollm2_and_the_head_is_tied(folder: Path, model: LlamaForCausalLM) -> None:
    shape = read_target_shape(folder)
    assert (shape.num_hidden_layers, shape.hidden_size, shape.vocab_size, shape.rope_theta) == (30, 576, 49152, 100000.0)
    assert json.loads((folder / "config.json").read_text())["rope_theta"] == 100000.0  # where transformers 4 reads it
    assert shape.tie_word_embeddings
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == torch.float32


def test_its_run_on_a_gpu_fits_it(folder: Path) -> None:
    config = configuration.load(ROOT / "launch/configs/smollm2_gpu.toml", [f"model.path={folder}"])
    assert config.draft.tap_layers == default_tap_layers(30, config.draft.num_layers)
    mask = load_tokenizer(folder).convert_ids_to_tokens(config.draft.mask_token_id)
    assert mask == "<empty_output>"


def test_the_chat_template_and_the_end_token_came_along(tokenizer: PreTrainedTokenizerBase) -> None:
    ids = render(tokenizer, [{"role": "user", "content": "Hi"}], generation_prompt=True)
    assert str(tokenizer.decode(ids)).endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"


def test_greedy_text_is_sensible(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = render(tokenizer, [{"role": "user", "content": "What is the capital of France?"}], generation_prompt=True)
    output = model.generate(
        inputs=torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, max_new_tokens=9
    )
    assert tokenizer.decode(output[0, len(ids) :]) == "The capital of France is Paris.<|im_end|>"


def test_its_own_template_is_prepared_and_masked(folder: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    """Its template puts in a system turn of its own, and a line feed behind each answer, which is not learnt."""
    rows = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}] * 2}]
    (tmp_path / "rows.jsonl").write_text(json.dumps(rows[0]))
    arguments = ["--model", folder, "--input", tmp_path / "rows.jsonl", "--out", tmp_path / "train"]
    assert prepare.main([str(word) for word in arguments]) == 0
    sample = Dataset.open(tmp_path / "train").read(0)
    assert read_supervised(tokenizer, sample) == ["Hello<|im_end|>"] * 2
    text = read_text(tokenizer, sample)
    assert text.startswith(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    )
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>")
