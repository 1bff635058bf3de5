"""Whole random models of the architectures that targets have, saved as folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
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

from common.config import ActorsConfig, Config, DataConfig, ModelConfig, PlanConfig, SyntheticConfig, TargetsConfig
from common.draft_config import DraftConfig
from common.target_shape import read_target_shape

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


KINDS = ["llama", "qwen3", "multimodal", "hybrid with experts", "hybrid in a multimodal wrapper"]


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


def make_folder(kind: str, folder: Path) -> PreTrainedModel:
    """A model of one of KINDS, the same at each call, saved in `folder`."""
    torch.manual_seed(3)
    model: PreTrainedModel = make_model(kind).train(False).requires_grad_(False)
    model.save_pretrained(folder)
    return model


def make_config(folder: Path, tap_layers: list[int], *, random_init: bool = False, seed: int = 0) -> Config:
    return Config(
        seed=seed,
        model=ModelConfig(path=str(folder), random_init=random_init, dtype="float32"),
        draft=DraftConfig(mask_token_id=VOCABULARY - 1, tap_layers=tap_layers, dtype="float32"),
        data=DataConfig(synthetic=SyntheticConfig(num_samples=1, num_eval_samples=1, min_length=2, max_length=2)),
        plan=PlanConfig(bucket_lengths=[16], max_tokens_per_batch=64, batches_per_step=1),
        targets=TargetsConfig(devices=["cpu"]),
        drafters=ActorsConfig(devices=["cpu"]),
        target_shape=read_target_shape(folder),
    )
