"""A tiny random model of every family that targets are tested with, and the table of them in services/target/README.md.

python -m tests.builders.families prints the table.
"""

from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig, PreTrainedModel

from common.config import Config
from services.target.loading import load_decoder
from services.target.model import TargetModel

CPU = torch.device("cpu")
VOCABULARY = 96
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 4,  # shorter than the rows of the tests
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {  # MLA
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "head_dim": 4,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
INDEXED = {"index_n_heads": 16, "index_head_dim": 8, "index_topk": 4}  # fewer heads make ties, which padding reorders
DELTA: dict[str, Any] = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
MAMBA_2: dict[str, Any] = {"mamba_d_head": 8, "mamba_n_heads": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
MAMBA_2 |= {"mamba_chunk_size": 4}
KIMI = {"linear_head_dim": 8, "linear_num_heads": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
PERIODS = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
NEMOTRON: dict[str, Any] = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 4, "n_groups": 1}
NEMOTRON |= {"layer_types": ["linear_attention", "mlp", "full_attention", "moe"], "moe_shared_expert_intermediate_size": 16}
PER_LAYER: dict[str, Any] = {  # Gemma 4: a table with a part for each layer, and layers that share keys
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
VISION: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "depth"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads"), 2),
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 32,
}


class Family(NamedTuple):
    """A family: its kind in the table, and keys of its configuration beside SHAPE; None leaves one of SHAPE out."""

    kind: str
    keys: dict[str, Any]


def _all(kind: str, names: str, **keys: Any) -> dict[str, Family]:
    return {name: Family(kind, keys) for name in names.split()}


TEXT = (
    _all(
        "dense",
        "apertus arcee bitnet cohere cohere2 diffllama doge ernie4_5 exaone exaone4 glm glm4 gpt_neox granite helium "
        "hunyuan_v1_dense hyperclovax internlm3 iquestcoder jais2 llama ministral ministral3 mistral nemotron "
        "olmo olmo2 olmo3 persimmon phi phi3 qwen2 qwen3 seed_oss smollm3 stablelm starcoder2",
    )
    | _all("dense", "falcon", head_dim=None, intermediate_size=None)
    | _all("dense", "gptj", rotary_dim=8)
    | _all("dense", "cwm", bos_token_id=1, eos_token_id=2)
    | _all("scaled embedding", "gemma gemma2 gemma4_unified_text vaultgemma")
    | _all("scaled embedding", "gemma3_text", layer_types=["sliding_attention", "full_attention"] * 2)
    | _all("scaled embedding", "gemma4_text", **PER_LAYER)
    | _all("scaled embedding", "afmoe", **EXPERTS)
    | _all(
        "MoE",
        "cohere2_moe dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe granitemoe granitemoeshared hunyuan_v1_moe hy_v3 "
        "jetmoe kolibri1 laguna mellum minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_moe sarvam_moe "
        "solar_open",
        **EXPERTS,
    )
    | _all("MoE", "zaya", **EXPERTS | {"num_experts_per_tok": 1})
    | _all("MoE", "llama4_text", attention_chunk_size=4, intermediate_size_mlp=48, num_local_experts=4)
    | _all("MLA", "axk1 axk2 deepseek_v2 deepseek_v3 glm4_moe_lite minicpm3 sarvam_mla youtu", **EXPERTS, **LATENT)
    | _all("MLA", "deepseek_v32 glm_moe_dsa", **EXPERTS, **LATENT, **INDEXED)
    | _all("hyper-connections", "deepseek_v4 hy_v4", **EXPERTS, **LATENT, **INDEXED)
    | _all("sinks", "gpt_oss mimo_v2_flash flint granite_swa granitemoe_swa", **EXPERTS)
    | _all("hybrid", "qwen3_next qwen3_5_text qwen3_5_moe_text", **EXPERTS, **DELTA)
    | _all("hybrid", "bailing_hybrid lara_mini minimax", **EXPERTS)
    | _all("hybrid", "olmo_hybrid lfm3")
    | _all("hybrid", "kimi_linear", **EXPERTS, **LATENT | {"head_dim": 8}, **KIMI)
    | _all("hybrid", "bamba", **MAMBA_2, head_dim=None, attn_layer_indices=[1])
    | _all("hybrid", "falcon_h1", **MAMBA_2, head_dim=None, mamba_d_ssm=64)
    | _all("hybrid", "granitemoehybrid", **EXPERTS, **MAMBA_2, head_dim=None, layer_types=["mamba", "attention"] * 2)
    | _all("hybrid", "jamba", **EXPERTS, **PERIODS, mamba_d_state=8)
    | _all("hybrid", "nemotron_h", **EXPERTS, **NEMOTRON)
    | _all("hybrid", "lfm2", layer_types=["conv", "full_attention"] * 2)
    | _all("hybrid", "lfm2_moe", **EXPERTS, layer_types=["conv", "full_attention"] * 2, num_dense_layers=1)
)
WRAPPERS = (
    _all(
        "wrapper",
        "aria aya_vision cohere2_vision deepseek_vl got_ocr2 idefics2 idefics3 internvl lfm2_vl lighton_ocr llava llava_next "
        "llava_onevision minicpmv4_6 mistral3 smolvlm video_llama_3 vipllava",
    )
    | _all("wrapper", "llama4", attention_chunk_size=4, intermediate_size_mlp=48, num_local_experts=4)
    | _all("wrapper", "qwen3_5", **DELTA)
    | _all("wrapper", "qwen3_5_moe", **EXPERTS, **DELTA)
    | _all("wrapper", "qwen2_vl qwen2_5_vl qwen3_vl", rope_parameters=SECTIONS)
    | _all("wrapper", "qwen3_vl_moe", **EXPERTS, rope_parameters=SECTIONS, sliding_window=None)
    | _all("wrapper of a scaled embedding", "gemma3", layer_types=["sliding_attention", "full_attention"] * 2)
    | _all("wrapper of a scaled embedding", "gemma4", **PER_LAYER, pad_token_id=0)
)


def make_family(name: str, **changes: Any) -> PreTrainedModel:
    """A random model of a family in float32, the same at each call; `changes` are keys of its decoder's configuration."""
    torch.manual_seed(3)
    auto: Any = AutoModelForImageTextToText if name in WRAPPERS else AutoModelForCausalLM
    model: PreTrainedModel = auto.from_config(make_family_config(name, **changes), dtype=torch.float32)
    model.train(False).requires_grad_(False)
    return model


def load_unchecked(config: Config) -> TargetModel:
    """Load a target on the CPU, also one whose first layer does not read rows of its embedding."""
    decoder, first_layers = load_decoder(config, [CPU])
    return TargetModel(decoder, config.draft.tap_layers, [CPU], first_layers)


def make_family_config(name: str, **changes: Any) -> PretrainedConfig:
    """The configuration of `make_family`."""
    family = WRAPPERS.get(name) or TEXT[name]
    keys = SHAPE | family.keys | changes
    default: Any = AutoConfig.for_model(name)
    if getattr(default.get_text_config(decoder=True), "sliding_window", False) is False:
        keys["sliding_window"] = None  # a key that this family does not have
    keys = {key: value for key, value in keys.items() if value is not None or (key in SHAPE and key.endswith("token_id"))}
    config: PretrainedConfig
    if name in WRAPPERS:
        text = {"model_type": default.get_text_config(decoder=True).model_type} | keys
        config = AutoConfig.for_model(name, text_config=text, vision_config=VISION)
    else:
        config = AutoConfig.for_model(name, **keys)
    return config


def format_table() -> str:
    """Return the families by kind as Markdown."""
    kinds: dict[str, list[str]] = {}
    for name, family in (TEXT | WRAPPERS).items():
        kinds.setdefault(family.kind, []).append(name)
    rows = [f"| {kind} | {', '.join(sorted(names))} |" for kind, names in kinds.items()]
    return "\n".join(["| kind | `model_type` in config.json |", "| --- | --- |", *rows])


if __name__ == "__main__":
    print(format_table())
