"""The numbers of a target's architecture that drafting depends on, read from its config.json."""

from pathlib import Path
from typing import Any

import msgspec

from common.errors import ModelError
from common.run_dir import read_object


class TargetShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Sizes in elements."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # 0 where config.json has none: every layer is made of experts
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool


def read_target_shape(folder: Path) -> TargetShape:
    """Read `folder`/config.json; multimodal wrappers keep the decoder's numbers in `text_config`.

    Raises:
        ModelError: no such folder, no config.json, or a key is missing.
    """
    outer, inner = read_target_config(folder)
    try:
        return TargetShape(
            model_type=inner["model_type"],
            vocab_size=inner["vocab_size"],
            hidden_size=inner["hidden_size"],
            intermediate_size=inner.get("intermediate_size") or 0,
            num_hidden_layers=inner["num_hidden_layers"],
            num_attention_heads=inner["num_attention_heads"],
            num_key_value_heads=inner.get("num_key_value_heads") or inner["num_attention_heads"],
            head_dim=inner.get("head_dim") or inner["hidden_size"] // inner["num_attention_heads"],
            rms_norm_eps=inner.get("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(inner, folder),
            max_position_embeddings=inner["max_position_embeddings"],
            tie_word_embeddings=outer.get("tie_word_embeddings", inner.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise _missing(folder, error) from error


def read_vocab_size(folder: Path) -> int:
    """Read only the number of token ids from `folder`/config.json; ModelError as `read_target_shape`."""
    try:
        return int(read_target_config(folder)[1]["vocab_size"])
    except KeyError as error:
        raise _missing(folder, error) from error


def read_target_config(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read `folder`/config.json: the whole, and the part of the text decoder, which is the whole without a wrapper.

    Raises:
        ModelError: no such folder, no config.json, or no JSON object in it.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"model.path: needed a model folder with config.json, found none in {folder}")
    outer = read_object(path, ModelError)
    inner = outer.get("text_config") or outer
    if not isinstance(inner, dict):
        raise ModelError(f"{path}: text_config: needed an object, found {type(inner).__name__}")
    return outer, inner


def _missing(folder: Path, error: KeyError) -> ModelError:
    return ModelError(f"{folder / 'config.json'}: needed the key {error}, found none")


def _rope_theta(inner: dict[str, Any], folder: Path) -> float:
    """Transformers 5 moved rope_theta into rope_parameters, by layer type if layers differ; older folders have it outside."""
    nested = inner.get("rope_parameters") or {}
    nested = nested.get("full_attention") or nested  # the draft model rotates as these layers
    theta = nested.get("rope_theta", inner.get("rope_theta"))
    if theta is None:
        needed = "rope_theta, at the top or in rope_parameters (there of the full-attention layers)"
        raise ModelError(f"{folder / 'config.json'}: needed {needed}, found neither")
    return float(theta)


def default_tap_layers(num_hidden_layers: int, num_taps: int) -> list[int]:
    """Return zero-based layers to tap, by the rule of z-lab/dflash: spread from layer 1 to layer L - 3."""
    if num_taps == 1:
        return [num_hidden_layers // 2]
    return [round(1 + i * (num_hidden_layers - 4) / (num_taps - 1)) for i in range(num_taps)]
