"""A drafter's folder, read as an inference engine reads it: with the engines' defaults, and nothing of ours.

L layers, D head_dim.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import CheckpointError
from common.weights import locate_tensors, read_tensors

DEFAULT_THETA = 10000.0  # what transformers takes where a config.json names no theta
_PREFIX = "model."
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
    """What an engine knows of a drafter. `content` is the whole config.json, `tensors` are float32."""

    path: Path
    content: dict[str, Any]
    block_size: int
    mask_token_id: int
    target_layer_ids: list[int]
    kinds: list[LayerKind]
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    eps: float
    rope: Rope
    other_rope: Rope | None  # by the other of the two schemas, where config.json has both
    tensors: dict[str, Tensor]


def read_folder(path: Path) -> Folder:
    """Read config.json and the weights.

    Raises:
        CheckpointError: unreadable, or a key that every engine needs is missing.
        ModelError: no weights.
    """
    content = read_content(path)
    own = content.get("dflash_config") or {}
    try:
        heads, num_layers = content["num_attention_heads"], content["num_hidden_layers"]
        head_dim = content.get("head_dim") or content["hidden_size"] // heads
        kinds = [layer_kind(content, kind) for kind in content.get("layer_types") or ["full_attention"] * num_layers]
        rope, other_rope = _ropes(content, head_dim)
        folder = Folder(
            path=path,
            content=content,
            block_size=content.get("block_size") or own["block_size"],
            mask_token_id=own["mask_token_id"],
            target_layer_ids=own["target_layer_ids"],
            kinds=kinds,
            num_heads=heads,
            num_key_value_heads=content.get("num_key_value_heads") or heads,
            head_dim=head_dim,
            eps=content.get("rms_norm_eps", 1e-6),
            rope=rope,
            other_rope=other_rope,
            tensors=_read_tensors(path, num_layers),
        )
        return _check_taps(folder)
    except KeyError as error:
        raise CheckpointError(f"{path / 'config.json'}: needed the key {error}, found none") from error


def read_content(path: Path) -> dict[str, Any]:
    """config.json. CheckpointError where it cannot be read."""
    try:
        content: dict[str, Any] = json.loads((path / "config.json").read_text())
    except OSError as error:
        raise CheckpointError(f"{path / 'config.json'}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'}: not JSON: {error}") from error
    return content


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
        return Rope(1.0 / theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated), 1.0)
    if kind not in ROPE_INIT_FUNCTIONS:
        raise CheckpointError(f"rope_type: needed default or one of {', '.join(ROPE_INIT_FUNCTIONS)}, found {kind}")
    config = Qwen3Config(
        head_dim=head_dim,
        hidden_size=content["hidden_size"],
        num_attention_heads=content["num_attention_heads"],
        max_position_embeddings=content.get("max_position_embeddings", 32768),
        rope_parameters={**parameters, "rope_theta": theta, "rope_type": kind},
    )
    return Rope(*ROPE_INIT_FUNCTIONS[kind](config))


def _read_tensors(path: Path, num_layers: int) -> dict[str, Tensor]:
    """Every tensor by the name it has in a folder of z-lab's layout."""
    names = sorted(locate_tensors(path))
    tensors = read_tensors(path, names, torch.device("cpu"), torch.float32)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}
    needed = [*_OUTER, *(f"layers.{index}.{name}.weight" for index in range(num_layers) for name in _LAYER)]
    missing = [name for name in needed if name not in tensors]
    if missing:
        raise CheckpointError(f"{path}: needed the tensors {', '.join(missing)}, found none of these names")
    return tensors


def _check_taps(folder: Folder) -> Folder:
    needed, found = len(folder.target_layer_ids) * folder.content["hidden_size"], folder.tensors["fc.weight"].shape[1]
    if needed != found:
        raise CheckpointError(f"{folder.path}: fc.weight: needed {needed} columns for target_layer_ids, found {found}")
    return folder
