"""Runs of tiny random drafters whose every number matters, as folders: a target, a checkpoint, an export."""

import json
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3_5Config, Qwen3_5ForConditionalGeneration

from common import config as configuration
from common.config import Config
from launch.data.synthetic import write_synthetic
from services.drafter.folder.checkpoint import Checkpoint, draft_identity, save
from services.drafter.folder.export import export
from services.drafter.model.model import DraftModel

SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.4,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
HYBRID = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"],
}
VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
TOML = """
seed = 7
model = {{ path = "{target}" }}
targets = {{ devices = ["cpu"] }}
drafters = {{ devices = ["cpu"] }}
[draft]
num_layers = 3
block_size = 4
mask_token_id = 63
tap_layers = [0, 2]
layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
sliding_window = 6
[data]
synthetic = {{ num_samples = 8, num_eval_samples = 4, min_length = 24, max_length = 48 }}
[plan]
bucket_lengths = [64]
max_tokens_per_batch = 128
batches_per_step = 1
"""


def make_run(run_dir: Path, *overrides: str, model_type: str = "qwen3", **shape: Any) -> Path:
    """A run directory with its target inside, evaluation data, a checkpoint and an export."""
    run_dir.mkdir()
    make_target(run_dir / "target", model_type, **shape)
    (run_dir / "run.toml").write_text(TOML.format(target=run_dir / "target"))
    return finish_run(run_dir, configuration.load(run_dir / "run.toml", list(overrides)))


def finish_run(run_dir: Path, config: Config) -> Path:
    """Data, checkpoint and export of a run."""
    config, weights = save_run(run_dir, config)
    export(run_dir / "export", config, weights, step=3, evaluation=None)
    return run_dir


def save_run(run_dir: Path, config: Config) -> tuple[Config, dict[str, Tensor]]:
    """Write data and checkpoint of a run whose weights are random, norms too, so that no two tensors are alike."""
    write_synthetic(config, run_dir / "data")
    paths = {"path": str(run_dir / "data/train"), "eval_path": str(run_dir / "data/eval")}
    data = msgspec.structs.replace(config.data, synthetic=None, **paths)
    config = msgspec.structs.replace(config, data=data)
    configuration.write(config, run_dir)
    generator = torch.Generator().manual_seed(5)
    weights = {
        name: weight.float() + _deviation(name) * torch.randn(weight.shape, generator=generator)
        for name, weight in DraftModel(config).state_dict().items()
    }
    record = Checkpoint(step=3, next_batch=0, plan_hash="aa", draft=draft_identity(config))
    save(run_dir, record, weights, {}, keep=1)
    return config, weights


def _deviation(name: str) -> float:
    """Return less for convolutions, whose weights add to 1: five layers of larger ones would multiply rounding."""
    return 0.05 if name.endswith("kernel_projection.weight") else 0.3


def make_target(folder: Path, model_type: str, **shape: Any) -> None:
    """A random target saved in bfloat16; "nested" is a hybrid decoder inside a multimodal wrapper."""
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    if model_type == "nested":
        model: Any = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=SHAPE | HYBRID | shape, vision_config=VISION))
    else:
        model = auto.from_config(AutoConfig.for_model(model_type, **(SHAPE | shape)))
    model.bfloat16().save_pretrained(folder)


def edit_config(folder: Path, **changes: Any) -> None:
    """Change keys of config.json; `dflash_config` and `rope_parameters` are changed inside; None removes a key."""
    path = folder / "config.json"
    content = json.loads(path.read_text())
    for key, value in changes.items():
        content[key] = {**content[key], **value} if isinstance(value, dict) else value
    path.write_text(json.dumps({key: value for key, value in content.items() if key not in changes or value is not None}))


def edit_tensor(folder: Path, name: str, change: Any) -> None:
    """Replace one tensor of model.safetensors by what `change` makes of it."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def remove_tensor(folder: Path, name: str) -> None:
    """Leave one tensor out of model.safetensors."""
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
