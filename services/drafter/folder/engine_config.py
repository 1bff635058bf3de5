"""The config.json of an exported drafter, in either layout that it can be written in.

The rotary embedding is plain, over the whole head, with the target's theta, whatever the target does with its own
(YaRN, a rotated part of each head, several axes): vLLM and SGLang take the drafter's from the drafter's config.json and
nothing from the target's, and the draft model was trained so.
"""

import json
from pathlib import Path
from typing import Any, Literal

from common.config import Config

LayoutName = Literal["dflash", "speculators"]


def engine_config(config: Config, layout: LayoutName) -> dict[str, Any]:
    """Return the content of config.json."""
    return dflash_config(config) if layout == "dflash" else speculators_config(config)


def dflash_config(config: Config) -> dict[str, Any]:
    """Return z-lab's layout, which vLLM and SGLang load: Qwen3's keys, and the drafter's own in `dflash_config`."""
    draft = config.draft
    own = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": draft.block_size,
        "dflash_config": {
            "block_size": draft.block_size,
            "mask_token_id": draft.mask_token_id,
            "target_layer_ids": draft.tap_layers,  # zero-based: vLLM and SGLang add 1 by themselves
        },
        "num_target_layers": config.shape.num_hidden_layers,
    }
    return own | _decoder_config(config)


def speculators_config(config: Config) -> dict[str, Any]:
    """Return the layout of vllm-project/speculators: Qwen3's keys in `transformer_layer_config`, tap ids one higher."""
    draft, vocab_size = config.draft, config.shape.vocab_size
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft.block_size - 1}],
            "verifier": {"name_or_path": config.model.path, "architectures": _target_architectures(config)},
        },
        "transformer_layer_config": _decoder_config(config),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in draft.tap_layers],
        "block_size": draft.block_size,
        "mask_token_id": draft.mask_token_id,
        "draft_vocab_size": vocab_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": False,
        "tie_word_embeddings": False,
    }


def _decoder_config(config: Config) -> dict[str, Any]:
    """Return the keys of transformers' Qwen3."""
    draft, shape = config.draft, config.shape
    sliding = "sliding_attention" in draft.layer_types
    return {
        "model_type": "qwen3",
        "num_hidden_layers": draft.num_layers,
        "layer_types": draft.layer_types,
        "use_sliding_window": sliding,
        "sliding_window": draft.sliding_window if sliding else None,
        "max_window_layers": draft.num_layers,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": draft.intermediate_size,
        "num_attention_heads": draft.num_attention_heads,
        "num_key_value_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_theta": shape.rope_theta,  # engines read either this schema
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},  # or this one
        "tie_word_embeddings": False,
        "use_cache": True,
    }


def _target_architectures(config: Config) -> list[str]:
    content = json.loads((Path(config.model.path).expanduser() / "config.json").read_text())
    architectures: list[str] = content.get("architectures") or []
    return architectures
