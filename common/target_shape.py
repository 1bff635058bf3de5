"""What the rest of the system must know of a target's architecture, read from its config.json."""

import json
from pathlib import Path
from typing import Any

import msgspec

from common.errors import ModelError


class TargetShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The numbers of a decoder that drafting depends on; sizes in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool


def read_target_shape(folder: Path) -> TargetShape:
    """Read `folder`/config.json, looking through the `text_config` of multimodal wrappers.

    Raises:
        ModelError: no such folder, no config.json, or a key is missing.
    """
    path = folder / "config.json"
    try:
        outer = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"model.path: needed a model folder, found no readable {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from error
    if not isinstance(outer, dict):
        raise ModelError(f"{path}: needed an object, found {type(outer).__name__}")
    inner: dict[str, Any] = outer.get("text_config", outer)
    try:
        return TargetShape(
            model_type=inner["model_type"],
            vocab_size=inner["vocab_size"],
            hidden_size=inner["hidden_size"],
            intermediate_size=inner["intermediate_size"],
            num_hidden_layers=inner["num_hidden_layers"],
            num_attention_heads=inner["num_attention_heads"],
            num_key_value_heads=inner.get("num_key_value_heads") or inner["num_attention_heads"],
            head_dim=inner.get("head_dim") or inner["hidden_size"] // inner["num_attention_heads"],
            rms_norm_eps=inner.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(inner, path),
            max_position_embeddings=inner["max_position_embeddings"],
            tie_word_embeddings=outer.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ModelError(f"{path}: needed the key {error}, found none") from error


def _rope_theta(inner: dict[str, Any], path: Path) -> float:
    """Transformers 5 moved rope_theta into rope_parameters; older folders have it at the top."""
    nested = inner.get("rope_parameters") or {}
    theta = nested.get("rope_theta", inner.get("rope_theta"))
    if theta is None:
        raise ModelError(f"{path}: needed rope_theta, at the top or in rope_parameters, found neither")
    return float(theta)


def default_tap_layers(num_hidden_layers: int, num_taps: int) -> list[int]:
    """Zero-based layers to tap, by the rule of z-lab/dflash: spread from layer 1 to layer L - 3."""
    if num_taps == 1:
        return [num_hidden_layers // 2]
    return [round(1 + i * (num_hidden_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
