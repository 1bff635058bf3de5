"""The config.json of an exported drafter, in either layout that it can be written in.

The rotary embedding is plain, over the whole head, with the target's theta, even if the target's own is not plain (YaRN, a
rotated part of each head, several axes): the draft model was trained so, and vLLM and SGLang take the drafter's embedding
from the drafter's config.json and nothing from the target's.
"""

import contextlib
import re
from pathlib import Path
from typing import Any, Literal

from common.config import Config
from common.draft_config import DraftConfig
from common.errors import CheckpointError, ModelError
from common.run_dir import read_object
from services.drafter.model.convolution import NUM_TAPS
from services.drafter.model.visibility import LayerMask

LayoutName = Literal["dflash", "speculators"]

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")  # "organisation/model", or one word; no path of a machine
_HUB_CACHE = "models--"  # a download lies in models--ORGANISATION--MODEL/snapshots/COMMIT


def engine_config(config: Config, layout: LayoutName) -> dict[str, Any]:
    """Return the content of config.json; CheckpointError if the layout cannot express what the draft model computes."""
    return _dflash_config(config) if layout == "dflash" else _speculators_config(config)


def _dflash_config(config: Config) -> dict[str, Any]:
    """Return z-lab's layout, which vLLM and SGLang load: Qwen3's keys, and the drafter's own in `dflash_config`.

    There is no `auto_map`: it names a file of code that z-lab puts beside the weights; engines go by `architectures`.
    """
    draft = config.draft
    own = {
        "architectures": ["DFlash2DraftModel" if draft.kind == "dflash2" else "DFlashDraftModel"],
        "block_size": draft.block_size,
        "dflash_config": {
            "block_size": draft.block_size,
            "mask_token_id": draft.mask_token_id,
            "target_layer_ids": draft.tap_layers,  # zero-based: vLLM and SGLang add 1 by themselves
            **_additions(config),
        },
        "num_target_layers": config.shape.num_hidden_layers,
    }
    if draft.is_causal is not None:
        own["is_causal"] = draft.is_causal
    return own | _decoder_config(config)


def _additions(config: Config) -> dict[str, float]:
    """Return the keys of DFlash 2's convolutions and selector, which engines need all, and the scales of its target."""
    if config.draft.kind == "dflash":
        return {}
    keys = "conv_group_size", "selector_rank", "selector_top_k"
    return {"conv_kernel_size": NUM_TAPS, **{key: getattr(config.draft, key) for key in keys}, **_scales(config)}


def _scales(config: Config) -> dict[str, float]:
    """Return what the target does to its embedding and logits, which engines do for a drafter only if they are told.

    vLLM reads the scale of DFlash's logits under another name among the decoder's keys; `check_draft` allows it no other.
    """
    shape, is_plain = config.shape, config.draft.kind == "dflash"
    stated = {
        "input_embedding_scale": (shape.embedding_scale, 1.0),
        "logit_scale" if is_plain else "output_multiplier": (shape.logit_scale, 1.0),
        "final_logit_softcapping": (shape.logit_softcap, 0.0),
    }
    return {key: value for key, (value, default) in stated.items() if value != default}


def _speculators_config(config: Config) -> dict[str, Any]:
    """Return the layout of vllm-project/speculators: Qwen3's keys in `transformer_layer_config`, tap ids one higher."""
    draft, vocab_size = config.draft, config.shape.vocab_size
    return {
        "architectures": ["DFlash2DraftModel" if draft.kind == "dflash2" else "DFlashSpeculator"],
        "speculators_model_type": draft.kind,
        "speculators_config": {
            "algorithm": draft.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": draft.block_size - 1}],
            "verifier": {
                "name_or_path": target_name(config),
                "architectures": _target_content(config).get("architectures") or [],
            },
        },
        "transformer_layer_config": _decoder_config(config),
        "aux_hidden_state_layer_ids": [layer + 1 for layer in draft.tap_layers],
        "block_size": draft.block_size,
        "mask_token_id": draft.mask_token_id,
        "draft_vocab_size": vocab_size,
        "sample_from_anchor": False,
        "sliding_window_non_causal": _is_non_causal(draft),
        **_additions(config),
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
        **(_scales(config) if draft.kind == "dflash" else {}),
    }


def _is_non_causal(draft: DraftConfig) -> bool:
    """Return the one value by which vLLM decides for every layer, full ones too, whether a block is causal."""
    causal = {LayerMask.of(draft, kind).causal for kind in draft.layer_types}
    if len(causal) > 1:
        raise CheckpointError(
            "draft.layer_types: needed layers that are all causal or all not for the speculators layout, found "
            f"{' and '.join(sorted(set(draft.layer_types)))}; z-lab's layout (--format dflash) holds both"
        )
    return causal == {False}


def target_name(config: Config) -> str:
    """Return the name of the target for others: that of its own config.json, of the hub's cache, or of its folder."""
    folder = Path(config.model.path).expanduser()
    with contextlib.suppress(ModelError):  # an export needs no target: its folder may be gone
        stated = _target_content(config).get("_name_or_path")
        if isinstance(stated, str) and _HUB_ID.fullmatch(stated):
            return stated
    cached = next((part for part in reversed(folder.parts) if part.startswith(_HUB_CACHE)), None)
    return cached.removeprefix(_HUB_CACHE).replace("--", "/") if cached else folder.absolute().name


def _target_content(config: Config) -> dict[str, Any]:
    return read_object(Path(config.model.path).expanduser() / "config.json", ModelError)
