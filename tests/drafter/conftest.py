"""Tiny targets, saved and loaded as real folders, and the configuration of a draft model of theirs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from common.config import Config, load

MASK_TOKEN = 63
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,  # wide, so that the greedy choice changes from token to token
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TOML = f"""
seed = 7
[draft]
num_layers = 2
block_size = 4
mask_token_id = {MASK_TOKEN}
tap_layers = [0, 2]
layer_types = ["sliding_attention", "full_attention"]
sliding_window = 6
dtype = "float32"
[data]
synthetic = {{ num_samples = 8, num_eval_samples = 4, min_length = 8, max_length = 16 }}
[plan]
bucket_lengths = [16]
max_tokens_per_batch = 64
batches_per_step = 1
[targets]
devices = ["cpu"]
[drafters]
devices = ["cpu"]
"""
Target = tuple[Config, PreTrainedModel]


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_target(tmp_path: Path) -> Callable[..., Target]:
    """make_target(model_type, *overrides, **shape): a run's configuration and its random float32 target."""

    def make(model_type: str, *overrides: str, **shape: Any) -> Target:
        folder = tmp_path / model_type
        torch.manual_seed(0)
        model_config = AutoConfig.for_model(model_type, **(SHAPE | shape))
        AutoModelForCausalLM.from_config(model_config, dtype=torch.float32).save_pretrained(folder)
        (tmp_path / "run.toml").write_text(TOML + f'[model]\npath = "{folder}"\ndtype = "float32"\n')
        config = load(tmp_path / "run.toml", list(overrides))
        target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return config, target

    return make
