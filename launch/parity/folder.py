"""A drafter's folder, read as an inference engine reads it, with the engines' defaults.

L layers, D head_dim.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import CheckpointError
from common.run_dir import read_object
from common.target_shape import default_tap_layers
from common.weights import locate_tensors, read_tensors
from services.drafter.folder.layouts import Layout, detect, find_foreign

DEFAULT_THETA = 10000.0  # what transformers takes where a config.json names no theta
_PREFIX = "model."
_OWN = ("mask_token_id", "target_layer_ids", "block_size")  # at the top, where dflash_config does not say it
_OF_SPECULATORS = ("layer_types", "sliding_window")  # at the top these override the decoder's
_OUTER = ["fc.weight", "hidden_norm.weight", "norm.weight"]
_ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"]
_LAYER = ["input_layernorm", *(f"self_attn.{name}" for name in _ATTENTION), "post_attention_layernorm"]
_LAYER += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


class LayerKind(NamedTuple):
    """What a layer may see.

    Attributes:
        window: W, rows of context and block that end with the asking one; 0 for all.
        causal: inside the block.
    """

    window: int
    causal: bool


class Rope(NamedTuple):
    """How positions turn heads.

    Attributes:
        inv_freq: float32 [D' / 2], radians per position; D' rotated channels, the first of each head.
        scaling: what cosine and sine are multiplied by; 1 but for YaRN and its like.
    """

    inv_freq: Tensor
    scaling: float


class Folder(NamedTuple):
    """What an engine knows of a drafter.

    `content` is config.json in z-lab's layout, `foreign` what it states that no drafter of ours does, one sentence each;
    `tensors` are float32, under z-lab's names.
    """

    path: Path
    content: dict[str, Any]
    foreign: list[str]
    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    kinds: list[LayerKind]
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    eps: float
    activation: str
    rope: Rope
    other_rope: Rope | None  # by the other of the two schemas, where config.json has both
    tensors: dict[str, Tensor]


def read_folder(path: Path) -> Folder:
    """Read config.json, in any of the layouts that engines read, and the weights.

    Raises:
        CheckpointError: unreadable, or a key or a tensor that every engine needs is missing.
        ModelError: no weights.
    """
    tensors, layout, written = _read(path)
    try:
        content = _in_one_layout(written, layout, tensors)
        own, heads, num_layers = content["dflash_config"], content["num_attention_heads"], content["num_hidden_layers"]
        head_dim = content.get("head_dim") or content["hidden_size"] // heads
        rope, other_rope = _ropes(content, head_dim)
        return Folder(
            path=path,
            content=content,
            foreign=[f"{key} is {found}, where training has {needed}" for key, needed, found in find_foreign(written, layout)],
            block_size=content["block_size"],
            mask_token_id=own["mask_token_id"],
            target_layer_ids=own["target_layer_ids"],
            kinds=[layer_kind(content, kind) for kind in content.get("layer_types") or ["full_attention"] * num_layers],
            num_heads=heads,
            num_key_value_heads=content.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            eps=content.get("rms_norm_eps", 1e-6),
            activation=_activation(content),
            rope=rope,
            other_rope=other_rope,
            tensors=_complete(path, tensors, num_layers),
        )
    except KeyError as error:
        raise CheckpointError(f"{path / 'config.json'}: needed the key {error}, found none") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / 'config.json'}: needed the settings of a drafter, found a value that is none: {error}"
        ) from error


def _read(path: Path) -> tuple[dict[str, Tensor], Layout, dict[str, Any]]:
    """The tensors by our names, the layout and config.json as it is."""
    content = read_object(path / "config.json", CheckpointError)
    names = sorted(locate_tensors(path))
    layout = detect(content, set(names))
    ours = {name: layout.renamed.get(name, name).removeprefix(_PREFIX) for name in names}
    if "fc.weight" not in ours.values():
        raise CheckpointError(f"{path}: needed a drafter with the tensor fc.weight, found none of this name")
    tensors = read_tensors(path, names, torch.device("cpu"), torch.float32)
    return {ours[name]: tensor for name, tensor in tensors.items()}, layout, content


def _in_one_layout(content: dict[str, Any], layout: Layout, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """config.json as z-lab would write it; vLLM rewrites that of speculators in the same way before it runs it."""
    outer = {key: content[key] for key in _OF_SPECULATORS if content.get(key) is not None}
    inner = content if layout.name != "speculators" else {**content["transformer_layer_config"], **outer}
    own = {key: content[key] for key in _OWN if content.get(key) is not None} | (content.get("dflash_config") or {})
    ids = content.get("aux_hidden_state_layer_ids") or own.get("target_layer_ids")
    if ids is None:  # SpecForge and TorchSpec compute them by z-lab's rule
        num_taps = tensors["fc.weight"].shape[1] // content["hidden_size"]
        ids = default_tap_layers(content["num_target_layers"], num_taps)
    if layout.name == "speculators":  # vLLM makes of this key one value for every layer, full ones too
        own["causal"] = not content.get("sliding_window_non_causal", True)
    own["target_layer_ids"] = [layer - layout.tap_offset for layer in ids]
    return {**inner, "block_size": content.get("block_size") or own["block_size"], "dflash_config": own}


def layer_kind(content: dict[str, Any], layer_type: str) -> LayerKind:
    """What vLLM and transformers make of a layer type.

    The first of these keys decides for all layers whether a block is causal: `is_causal`, `dflash_config.is_causal`,
    `dflash_config.causal`; where none is there, sliding layers are and full layers are not (vLLM 46104 and 52816).
    A window counts only with `use_sliding_window`, which is false where it is not written (Qwen3Config).
    """
    own = content.get("dflash_config") or {}
    sliding = layer_type == "sliding_attention"
    said = (content.get("is_causal"), own.get("is_causal"), own.get("causal"))
    causal = next((bool(value) for value in said if value is not None), sliding)
    window = content.get("sliding_window") if sliding and content.get("use_sliding_window") else None
    return LayerKind(int(window or 0), causal)


def _ropes(content: dict[str, Any], head_dim: int) -> tuple[Rope, Rope | None]:
    """What transformers 5 reads, where `rope_parameters` comes first, and what an older reader takes, if that is there."""
    older = {**(content.get("rope_scaling") or {})}
    older |= {key: content[key] for key in ("rope_theta", "partial_rotary_factor") if content.get(key) is not None}
    newer = {**older, **(content.get("rope_scaling") or content.get("rope_parameters") or {})}
    both = "rope_theta" in (content.get("rope_parameters") or {}) and "rope_theta" in older
    return _rope(content, newer, head_dim), _rope(content, older, head_dim) if both else None


def _rope(content: dict[str, Any], parameters: dict[str, Any], head_dim: int) -> Rope:
    theta = float(parameters.get("rope_theta", DEFAULT_THETA))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        rotated = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        return _default_rope(theta, rotated)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise ValueError(f"rope_type {kind}")
    config = Qwen3Config(
        head_dim=head_dim,
        hidden_size=content["hidden_size"],
        num_attention_heads=content["num_attention_heads"],
        max_position_embeddings=content.get("max_position_embeddings", 32768),
        rope_parameters={**parameters, "rope_theta": theta, "rope_type": kind},
    )
    return Rope(*ROPE_INIT_FUNCTIONS[kind](config))


def _activation(content: dict[str, Any]) -> str:
    activation: str = content.get("hidden_act", "silu")
    if activation not in ACT2FN:
        raise ValueError(f"hidden_act {activation}")
    return activation


def _default_rope(theta: float, num_channels: int) -> Rope:
    """Without scaling."""
    return Rope(1.0 / theta ** (torch.arange(0, num_channels, 2, dtype=torch.float32) / num_channels), 1.0)


def _complete(path: Path, tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """The tensors, if none is missing."""
    needed = [*_OUTER, *(f"layers.{index}.{name}.weight" for index in range(num_layers) for name in _LAYER)]
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise CheckpointError(f"{path}: needed the tensors {', '.join(missing)}, found none of these names")
    return tensors
