"""The layouts of drafter folders, one table each: the keys of every setting and the names of the tensors.

dflash        z-lab, SpecForge, NeMo Automodel and this project: Qwen3's keys at the top, the drafter's own in `dflash_config`
speculators   vllm-project/speculators: Qwen3's keys in `transformer_layer_config`, tap ids one higher
torchspec     lightseekorg/TorchSpec: the keys of dflash or flat ones, three tensors under other names
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

Content = dict[str, Any]  # of a config.json
Foreign = tuple[str, Any, Any]  # path, needed value, found value
KeyPaths = dict[str, tuple[str, ...]]  # our key -> dotted paths in config.json; the first one present counts

_DECODER = {
    "num_layers": ("num_hidden_layers",),
    "layer_types": ("layer_types",),
    "sliding_window": ("sliding_window",),
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "intermediate_size": ("intermediate_size",),
    "num_attention_heads": ("num_attention_heads",),
    "num_key_value_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "rms_norm_eps": ("rms_norm_eps",),
    "rope_theta": ("rope_parameters.rope_theta", "rope_theta", "rope_scaling.rope_theta"),
}
_DFLASH2 = ("conv_group_size", "selector_rank", "selector_top_k")  # the settings that only DFlash 2 has
_SCALES = {  # of the target that an engine has to be told
    "embedding_scale": ("input_embedding_scale",),
    "logit_scale": ("output_multiplier", "logit_scale"),
    "logit_softcap": ("final_logit_softcapping",),
}
_DFLASH_OWN = {
    **{key: (*(f"dflash_config.{name}" for name in names), *names) for key, names in _SCALES.items()},
    **{key: (f"dflash_config.{key}", key) for key in _DFLASH2},
    "is_causal": ("is_causal", "dflash_config.causal"),
    "block_size": ("dflash_config.block_size", "block_size"),
    "mask_token_id": ("dflash_config.mask_token_id", "mask_token_id"),
    "tap_layers": ("dflash_config.target_layer_ids", "target_layer_ids"),
    "num_hidden_layers": ("num_target_layers",),
}
_SPECULATORS_OWN = {
    **_SCALES,
    "logit_scale": ("output_multiplier", "transformer_layer_config.logit_scale"),
    **{key: (key,) for key in _DFLASH2},
    "block_size": ("block_size",),
    "mask_token_id": ("mask_token_id",),
    "tap_layers": ("aux_hidden_state_layer_ids",),
    "draft_vocab_size": ("draft_vocab_size",),
}
_SPECULATORS_WINDOW = ("layer_types", "sliding_window")  # vLLM lets these at the top override the nested ones


class Layout(NamedTuple):
    """Keys and tensor names of one layout."""

    name: str
    paths: KeyPaths
    decoder: str  # dotted path of Qwen3's keys; "" at the top
    tap_offset: int  # added to our tap ids in this layout
    renamed: dict[str, str]  # its tensors -> ours


def _nested(paths: KeyPaths, under: str) -> KeyPaths:
    return {key: tuple(f"{under}.{path}" for path in found) for key, found in paths.items()}


_IN_SPECULATORS = _nested(_DECODER, "transformer_layer_config")
_WINDOW = {key: (key, *_IN_SPECULATORS[key]) for key in _SPECULATORS_WINDOW}

DFLASH = Layout("dflash", _DECODER | _DFLASH_OWN, "", 0, {})
SPECULATORS = Layout("speculators", _IN_SPECULATORS | _WINDOW | _SPECULATORS_OWN, "transformer_layer_config", 1, {})
TORCHSPEC = Layout(
    "torchspec",
    _DECODER | _DFLASH_OWN | {"num_hidden_layers": ("target_num_hidden_layers", "num_target_layers")},
    "",
    0,
    {"context_proj.weight": "fc.weight", "context_norm.weight": "hidden_norm.weight", "final_norm.weight": "norm.weight"},
)

# Names that some files give to tensors of DFlash 2 -> ours.
_CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
RENAMED = {f"{name}.weight": name for name in _CODEBOOKS}
_DFLASH2_NAMES = ("DFlash2DraftModel", "Qwen3DFlash2DraftModel", "dflash2")  # architectures, and the type of speculators

# Tensors of the target that some projects save with the drafter; they are never read.
TARGETS_TENSORS = ("embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight")

# Options of other projects that this draft model does not compute: the only accepted value of each.
FIXED_IN_DECODER: Content = {
    "attention_bias": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
    "is_neox_style": True,
    "rope_is_neox_style": True,
    "rope_parameters.rope_type": "default",
    "rope_parameters.partial_rotary_factor": 1.0,
    "rope_parameters.mrope_section": None,
    "rope_scaling.rope_type": "default",
    "rope_scaling.type": "default",
}
FIXED: Content = {
    "dflash_config.use_swa": False,
    "dflash_config.attention_sink_bias": False,
    "dflash_config.attention_mode": "gqa",
    "dflash_config.attention_modes": None,
    "dflash_config.projector_type": "dflash",
    "dflash_config.shift_label": False,
    "projector_type": "dflash",
    "shift_label": False,
    "sample_from_anchor": False,
    **{f"{prefix}{key}": value for prefix in ("dflash_config.", "") for key, value in (("conv_kernel_size", 2),)},
    "markov_rank": 0,
    "enable_confidence_head": False,
}
_NON_CAUSAL_WINDOW = "sliding_window_non_causal"


def detect(content: Content, tensor_names: set[str]) -> Layout:
    """Return the layout of a folder. Unknown ones are read as dflash, so that errors name the missing keys."""
    if "speculators_model_type" in content or "transformer_layer_config" in content:
        return SPECULATORS
    return TORCHSPEC if tensor_names & TORCHSPEC.renamed.keys() else DFLASH


def get_nested(content: Content, path: str) -> Any:
    """Return the value at a dotted path, or None."""
    value: Any = content
    for key in path.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def read_settings(content: Content, layout: Layout) -> Content:
    """Return the settings of a folder under our keys, with Qwen3's defaults; a setting without either is absent."""
    settings = {key: stated[0] for key, paths in layout.paths.items() if (stated := _stated(content, paths))}
    heads, num_layers = settings.get("num_attention_heads"), settings.get("num_layers")
    settings = {"rms_norm_eps": 1e-6, "embedding_scale": 1.0, "logit_scale": 1.0, "logit_softcap": 0.0} | settings
    if heads:
        settings.setdefault("num_key_value_heads", heads)
        if "hidden_size" in settings:
            settings.setdefault("head_dim", settings["hidden_size"] // heads)
    if num_layers is not None:
        settings.setdefault("layer_types", ["full_attention"] * num_layers)
    if layout is SPECULATORS and content.get(_NON_CAUSAL_WINDOW):
        settings["is_causal"] = False
    settings["is_causal"] = uncommon_causality(settings.get("is_causal"), settings.get("layer_types", ()))
    named = {*(content.get("architectures") or ()), content.get("speculators_model_type")}
    settings["kind"] = "dflash2" if named & set(_DFLASH2_NAMES) or settings.keys() & set(_DFLASH2) else "dflash"
    if "sliding_attention" not in settings.get("layer_types", ()):
        settings["sliding_window"] = 0
    if "tap_layers" in settings:
        settings["tap_layers"] = [layer - layout.tap_offset for layer in settings["tap_layers"]]
    return settings


def find_foreign(content: Content, layout: Layout) -> list[Foreign]:
    """List the settings that ask for something this draft model does not compute."""
    prefix = f"{layout.decoder}." if layout.decoder else ""
    fixed = FIXED | {prefix + path: value for path, value in FIXED_IN_DECODER.items()}
    foreign = _find_others(content, fixed)
    for key in layout.paths.keys() & {
        "rope_theta",
        "block_size",
        "is_causal",
    }:  # two keys with different values: engines differ in which of them they read
        values = _stated(content, layout.paths[key])
        foreign += [(key, "one value", values)] if len(set(values)) > 1 else []
    sliding = [kind == "sliding_attention" for kind in read_settings(content, layout).get("layer_types", ())]
    if any(sliding):
        foreign += _find_others(content, {f"{prefix}use_sliding_window": True})
    return foreign


def uncommon_causality(is_causal: bool | None, layer_types: Sequence[str]) -> bool | None:
    """Return `is_causal` of all layers, or None where it says what is common: sliding layers causal, full ones not."""
    if is_causal is None or all(is_causal == (kind == "sliding_attention") for kind in layer_types):
        return None
    return bool(is_causal)


def _stated(content: Content, paths: tuple[str, ...]) -> list[Any]:
    return [value for path in paths if (value := get_nested(content, path)) is not None]


def _find_others(content: Content, fixed: Content) -> list[Foreign]:
    found = [(path, needed, get_nested(content, path)) for path, needed in fixed.items()]
    return [(path, needed, value) for path, needed, value in found if value is not None and value != needed]
