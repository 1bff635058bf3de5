"""Tiny targets, saved and loaded as real folders, and the configuration of a draft model of theirs."""

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

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
[train]
anchors_per_batch = 100
[targets]
devices = ["cpu"]
[drafters]
devices = ["cpu"]
"""


def make_target(folder: Path, model_type: str, *overrides: str, **shape: Any) -> tuple[Config, Any]:
    """A run's configuration and its random float32 target, both written to and read from `folder`."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model_config = AutoConfig.for_model(model_type, **(SHAPE | shape))
    auto.from_config(model_config, dtype=torch.float32).save_pretrained(folder / "target")
    (folder / "run.toml").write_text(TOML + f'[model]\npath = "{folder / "target"}"\ndtype = "float32"\n')
    config = load(folder / "run.toml", list(overrides))
    return config, auto.from_pretrained(folder / "target", dtype=torch.float32).eval()


def write_shape(folder: Path, **keys: Any) -> Path:
    """Write a folder that holds a config.json with these keys and nothing else."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(keys))
    return folder
