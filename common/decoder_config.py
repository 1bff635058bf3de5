"""The configuration of a target's decoder as transformers completes it: class defaults, nested text_config, renamed keys.

Works without torch, so that `launch.start_all` can ask a child process that starts in a second (common.target_shape).
"""

import sys
from pathlib import Path
from typing import Any

import msgspec
from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from common.errors import ModelError
from common.target_shape import TargetShape, read_target_config

_NORM_KEYS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon", "norm_epsilon")
_NORM_EPS, _ROPE_THETA = 1e-6, 10000.0  # of the draft, where the target has neither
_EMBEDDING_SCALES = ("embedding_multiplier", "embedding_scale", "scale_emb")
_LOGIT_SCALES = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
_CHANGED_INPUT = (
    "biogpt",
    "bloom",
    "ctrl",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "inkling_text",
    "nanochat",
    "openai-gpt",
    "opt",
    "xglm",
)
_UNSUPPORTED = {  # a key that only such a family has, and the property that drafting needs
    "altup_num_inputs": "layers with one stream of hidden states, as engines hand on",
    "zero_expert_num": "layers with one attention",
    "n_recurrent_loops": "layers that run once",
    "num_layers_per_stack": "layers that run once",
}


def read_text_config(folder: Path) -> PretrainedConfig:
    """Read the configuration of the text decoder, also from inside the wrapper of a multimodal model.

    Raises:
        ModelError: no config.json, an architecture that transformers does not know, or one that cannot be drafted for.
    """
    text_config: PretrainedConfig = _read(folder)[1]
    return text_config


def derive_shape(folder: Path) -> TargetShape:
    """Return the shape of a target, without its source; ModelError as `read_text_config`, and for a missing number."""
    outer, config = _read(folder)
    try:
        heads = config.num_attention_heads
        return TargetShape(
            model_type=config.model_type,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=_intermediate_size(config),
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=_num_key_value_heads(config),
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            rms_norm_eps=next((float(eps) for key in _NORM_KEYS if (eps := getattr(config, key, None))), _NORM_EPS),
            rope_theta=_rope_theta(config),
            max_position_embeddings=config.max_position_embeddings,
            tie_word_embeddings=_ties(folder, outer),
            embedding_scale=_embedding_scale(config),
            logit_scale=_logit_scale(config),
            logit_softcap=float(next((cap for key in _SOFTCAPS if (cap := getattr(config, key, None))), 0.0)),
        )
    except AttributeError as error:
        raise ModelError(f"{folder / 'config.json'}: needed the key '{error.name}', found none") from error


def _read(folder: Path) -> tuple[PretrainedConfig, Any]:
    """Return the configuration of the whole model, and that of its decoder."""
    written, _ = read_target_config(folder)
    if "model_type" not in written:
        raise ModelError(f"{folder / 'config.json'}: needed the key 'model_type', found none")
    try:
        outer = AutoConfig.from_pretrained(folder, local_files_only=True)
        inner = outer.get_text_config(decoder=True)
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        line = str(error).strip().partition("\n")[0]
        raise ModelError(f"{folder}: needed an architecture that transformers knows, found: {line}") from error
    model_type = getattr(inner, "model_type", f"a text_config of {outer.model_type}")  # a family that does not know that key
    if model_type not in MODEL_MAPPING_NAMES or getattr(inner, "is_encoder_decoder", False):
        raise ModelError(f"{folder}: needed a decoder that transformers can make, found {model_type}")
    inner.allow_global_per_layer_attribute_access = True  # or reading head_dim of Gemma 4 is an error
    if model_type in _CHANGED_INPUT:
        needed = "a first layer that reads rows of the embedding, as engines feed a draft model"
        raise ModelError(f"{folder}: needed {needed}, found {model_type}, which adds positions or a norm to them")
    if key := next((key for key in _UNSUPPORTED if getattr(inner, key, None)), None):
        raise ModelError(f"{folder}: needed {_UNSUPPORTED[key]}, found {model_type} with {key} {getattr(inner, key)}")
    return outer, inner


def _ties(folder: Path, outer: PretrainedConfig) -> bool:
    """Return whether head and embedding are one tensor: as the wrapper writes, or the decoder in it, or the class of both."""
    written = [part["tie_word_embeddings"] for part in read_target_config(folder) if "tie_word_embeddings" in part]
    return bool(written[0] if written else getattr(outer, "tie_word_embeddings", False))


def _intermediate_size(config: Any) -> int:
    """Return the width of the dense feed-forward layers, or 0 where all layers are made of experts or config.json has none."""
    sizes = getattr(config, "intermediate_size", None) or getattr(config, "ffn_hidden_size", None) or 0
    return max(sizes) if isinstance(sizes, list) else int(sizes)  # Gemma 3n and Nemotron name one for each layer


def _num_key_value_heads(config: Any) -> int:
    """Return the heads of keys and values; Falcon says by two switches whether its number counts."""
    if config.model_type == "falcon" and not config.new_decoder_architecture:
        return 1 if config.multi_query else int(config.num_attention_heads)
    return int(
        getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or config.num_attention_heads
    )


def _rope_theta(config: Any) -> float:
    """Return the base of the rotation of full-attention layers, as which the draft model rotates."""
    nested = getattr(config, "rope_parameters", None) or {}
    kinds = [value for value in nested.values() if isinstance(value, dict)]
    nested = nested.get("full_attention") or (kinds[0] if kinds else nested)
    return float(nested.get("rope_theta") or getattr(config, "rope_theta", None) or _ROPE_THETA)


def _embedding_scale(config: Any) -> float:
    """Return the factor of the embedding's rows: a number of the configuration, or the root of the hidden size."""
    if "gemma" in config.model_type or getattr(config, "scale_embedding", False) or getattr(config, "mup_enabled", False):
        return float(config.hidden_size**0.5)
    return float(next((scale for key in _EMBEDDING_SCALES if (scale := getattr(config, key, None))), 1.0))


def _logit_scale(config: Any) -> float:
    """Return the factor of the logits, under the name that the family has for it or for its inverse."""
    if scaling := getattr(config, "logits_scaling", None):  # by which Granite and its like divide
        return float(scaling) if "hyperclovax" in config.model_type else 1.0 / float(scaling)
    if config.model_type == "mpt":  # whose key no code reads
        return 1.0
    return float(next((scale for key in _LOGIT_SCALES if (scale := getattr(config, key, None))), 1.0))


def main() -> None:
    """Print the shape of the folder on the command line as JSON, or the reason against it; exit code 2 for the latter."""
    try:
        print(msgspec.json.encode(derive_shape(Path(sys.argv[1]))).decode())
    except ModelError as error:
        print(error)
        sys.exit(2)
