"""Read a drafter's folder as an inference engine reads it, with the engines' defaults. D head_dim."""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from common.errors import CheckpointError
from common.run_dir import read_object
from common.weights import locate_tensors, read_tensors
from services.drafter.folder.drafter_folder import read_drafter
from services.drafter.folder.layouts import detect, find_foreign, get_nested

DEFAULT_THETA = 10000.0  # of transformers, where a config.json names no theta
_OF_SPECULATORS = ("layer_types", "sliding_window")  # at the top these override the decoder's
_NEEDED = ("block_size", "mask_token_id", "tap_layers", "num_layers", "num_attention_heads", "hidden_size", "intermediate_size")
_SCALING = {"input_embedding_scale": 1.0, "output_multiplier": 1.0, "final_logit_softcapping": 0.0}  # of DFlash 2, if stated
_PREFIX = "model."


class LayerKind(NamedTuple):
    """The rows that a layer may see."""

    window: int  # W, rows of context and block that end with the query's own; 0 for all
    causal: bool  # inside the block


class Rope(NamedTuple):
    """The rotation of heads."""

    inv_freq: Tensor  # float32 [D' / 2], radians per position; D' rotated channels, the first of each head
    scaling: float  # factor of cosine and sine; 1 but for YaRN and its like


class Folder(NamedTuple):
    """A drafter as an engine knows it."""

    path: Path
    content: dict[str, Any]  # config.json with the keys of the decoder at the top
    settings: dict[str, Any]  # under the names of DraftConfig and TargetShape
    foreign: list[str]  # settings that no drafter of ours has, one sentence each
    kinds: list[LayerKind]  # of every layer
    activation: str
    rope: Rope  # by `rope_parameters`, as transformers 5 reads it
    older_rope: Rope | None  # by the older keys, where config.json has both
    tensors: dict[str, Tensor]  # float32, under z-lab's names


def read_folder(path: Path) -> Folder:
    """Read config.json, in any of the layouts that engines read, and the weights.

    Raises:
        CheckpointError: unreadable, or a key that every engine needs is missing.
        ModelError: no weights.
    """
    written = read_object(path / "config.json", CheckpointError)
    names = sorted(locate_tensors(path))
    layout = detect(written, set(names))
    ours = {name: layout.renamed.get(name, name).removeprefix(_PREFIX) for name in names}
    if "fc.weight" not in ours.values():
        raise CheckpointError(f"{path}: needed a drafter with the tensor fc.weight, found none of this name")
    try:
        content = _flatten(written) if layout.name == "speculators" else written
        settings = _read_settings(path, written, content)
        rope, older_rope = _ropes(content, settings["head_dim"])
        return Folder(
            path=path,
            content=content,
            settings=settings,
            foreign=[f"{key} is {found}, where training has {needed}" for key, needed, found in find_foreign(written, layout)],
            kinds=[layer_kind(content, kind) for kind in settings["layer_types"]],
            activation=_known(content.get("hidden_act", "silu"), ACT2FN, "hidden_act"),
            rope=rope,
            older_rope=older_rope,
            tensors=_read_tensors(path, ours),
        )
    except KeyError as error:
        raise CheckpointError(f"{path / 'config.json'}: needed the key {error}, found none") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path / 'config.json'}: needed the settings of a drafter, found a value that is none: {error}"
        ) from error


def layer_kind(content: dict[str, Any], layer_type: str) -> LayerKind:
    """Return the kind that vLLM and transformers make of a layer type.

    The first of these keys decides for all layers whether a block is causal: `is_causal`, `dflash_config.is_causal`,
    `dflash_config.causal`; without them sliding layers are causal and full layers are not (vLLM 46104 and 52816).
    A window counts only with `use_sliding_window`, which defaults to false (Qwen3Config).
    """
    sliding = layer_type == "sliding_attention"
    stated = _stated_causality(content)
    causal = sliding if stated is None else stated
    window = content.get("sliding_window") if sliding and content.get("use_sliding_window") else None
    return LayerKind(int(window or 0), causal)


def _stated_causality(content: dict[str, Any]) -> bool | None:
    stated = (get_nested(content, path) for path in ("is_causal", "dflash_config.is_causal", "dflash_config.causal"))
    return next((bool(value) for value in stated if value is not None), None)


def _flatten(written: dict[str, Any]) -> dict[str, Any]:
    """Rewrite config.json of speculators as vLLM does before it runs the drafter."""
    outer = {key: written[key] for key in _OF_SPECULATORS if written.get(key) is not None}
    causal = not written.get("sliding_window_non_causal", True)  # one value for every layer, full ones too
    return {**written["transformer_layer_config"], **outer, "dflash_config": {"causal": causal}}


def _read_settings(path: Path, written: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Return the settings; KeyError where one is missing that every engine needs."""
    settings = read_drafter(path).settings
    needed = {key: settings[key] for key in _NEEDED}
    needed["block_size"] = written.get("block_size") or needed["block_size"]  # engines read the key at the top first
    needed["layer_types"] = settings["layer_types"] or ["full_attention"] * needed["num_layers"]
    return {**settings, **needed, **_read_kind(written, content)}


def _read_kind(written: dict[str, Any], content: dict[str, Any]) -> dict[str, Any]:
    """Return the kind of the drafter, by the name of its model, and the settings that only DFlash 2 has.

    As in vLLM all of them must be there; speculators has them at the top. `is_causal` is what a drafter of this folder was
    trained with: what is stated, else what training takes; an engine has a rule of its own, see `layer_kind`.
    """
    names = [*(written.get("architectures") or []), written.get("speculators_model_type") or ""]
    if not any("dflash2" in str(name).lower() for name in names):
        return {"kind": "dflash", "is_causal": None, "output_multiplier": float(content.get("logit_scale") or 1.0)}
    own = written if "transformer_layer_config" in written else written["dflash_config"]
    if own["conv_kernel_size"] != 2:
        raise ValueError(f"conv_kernel_size {own['conv_kernel_size']}")
    settings = {key: int(own[key]) for key in ("conv_group_size", "selector_rank", "selector_top_k")}
    scaling = {key: float(own.get(key) or default) for key, default in _SCALING.items()}
    return {"kind": "dflash2", "is_causal": bool(_stated_causality(content)), **settings, **scaling}


def _read_tensors(path: Path, ours: dict[str, str]) -> dict[str, Tensor]:
    tensors = read_tensors(path, list(ours), torch.device("cpu"), torch.float32)
    return {ours[name]: tensor for name, tensor in tensors.items()}


def _ropes(content: dict[str, Any], head_dim: int) -> tuple[Rope, Rope | None]:
    """Return the rotation by the newer keys, and by the older ones where both are there."""
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
    config = Qwen3Config(
        head_dim=head_dim,
        hidden_size=content["hidden_size"],
        num_attention_heads=content["num_attention_heads"],
        max_position_embeddings=content.get("max_position_embeddings", 32768),
        rope_parameters={**parameters, "rope_theta": theta, "rope_type": _known(kind, ROPE_INIT_FUNCTIONS, "rope_type")},
    )
    return Rope(*ROPE_INIT_FUNCTIONS[kind](config))


def _known(value: str, functions: Any, key: str) -> str:
    if value not in functions:
        raise ValueError(f"{key} {value}")
    return value
