"""A trained draft model as the files that inference engines load (dflash.md section 5)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from common.config import Config
from common.errors import CheckpointError
from services.drafter.drafter_folder import CONFIG, differing_shapes, read_drafter, tensor_shapes
from services.drafter.durable_folder import durable_folder

WEIGHTS, CARD = "model.safetensors", "README.md"
ARCHITECTURES = ["DFlashDraftModel"]


def export(folder: Path, config: Config, weights: Mapping[str, Tensor], step: int, acceptance_length: float | None) -> None:
    """Write `folder` with config.json, model.safetensors (bfloat16) and a README.md; replace an export that is there.

    Args:
        folder: where to.
        config: the configuration of the run.
        weights: the master weights by parameter name, of any float type.
        step: optimizer steps behind these weights.
        acceptance_length: measured on held-out samples; None when there is no such measurement.

    Raises:
        CheckpointError: the folder holds something else, the weights are not those of the draft model of `config`,
            the disk refused, or what was written does not read back as the same bytes.
    """
    _check_replaceable(folder)
    _check_shapes(folder, weights, tensor_shapes(config))
    rounded = {name: weights[name].detach().to("cpu", torch.bfloat16).contiguous() for name in tensor_shapes(config)}
    with durable_folder(folder) as aside:
        (aside / CONFIG).write_text(json.dumps(engine_config(config), indent=2) + "\n")
        (aside / CARD).write_text(_card(config, step, acceptance_length))
        _write_weights(aside / WEIGHTS, rounded)
        _check_reading(aside, config, rounded)


def engine_config(config: Config) -> dict[str, Any]:
    """The content of config.json, in the schema of transformers' Qwen3 and the additions of z-lab/dflash."""
    draft, shape = config.draft, config.shape
    sliding = "sliding_attention" in draft.layer_types
    return {
        "architectures": ARCHITECTURES,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "block_size": draft.block_size,
        "dflash_config": {
            "block_size": draft.block_size,
            "mask_token_id": draft.mask_token_id,
            "target_layer_ids": draft.tap_layers,  # zero-based: vLLM and SGLang add 1 by themselves
        },
        "num_target_layers": shape.num_hidden_layers,
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


def _card(config: Config, step: int, acceptance_length: float | None) -> str:
    draft, target = config.draft, Path(config.model.path).name
    measured = "not measured" if acceptance_length is None else f"{acceptance_length:.3f} tokens per verification round"
    speculative = json.dumps({"method": "dflash", "model": "<this folder>", "num_speculative_tokens": draft.block_size - 1})
    return f"""# DFlash drafter for {target}

Trained by Headrace (algorithm: arXiv 2602.06036). It drafts for this target only, and uses the target's embedding and head.

- Target: {target}, {config.shape.num_hidden_layers} layers, taps after layers {", ".join(map(str, draft.tap_layers))}
- Draft model: {draft.num_layers} layers, block size {draft.block_size}, mask token id {draft.mask_token_id}
- Optimizer steps: {step}
- Held-out greedy acceptance length: {measured}

## Serving

Use a release of the engine that knows DFlash.

    vllm serve <target> --speculative-config '{speculative}'

    python -m sglang.launch_server --model-path <target> --speculative-algorithm DFLASH \\
        --speculative-draft-model-path <this folder>
"""


def _check_replaceable(folder: Path) -> None:
    """Only an empty folder or an earlier export is ever replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    try:
        architectures = json.loads((folder / CONFIG).read_text())["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        architectures = None
    if architectures != ARCHITECTURES:
        raise CheckpointError(f"{folder}: needed a new folder or an earlier export, found something else")


def _write_weights(path: Path, weights: dict[str, Tensor]) -> None:
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not written: {error}") from error


def _check_shapes(folder: Path, weights: Mapping[str, Tensor], needed: dict[str, list[int]]) -> None:
    if lines := differing_shapes(needed, {name: list(weight.shape) for name, weight in weights.items()}):
        raise CheckpointError(f"{folder}: {'; '.join(lines)}")


def _check_reading(folder: Path, config: Config, needed: Mapping[str, Tensor]) -> None:
    """What was written must say what `config` says, and hold the same bytes."""
    drafter = read_drafter(folder)
    if misfits := drafter.misfits(config):
        raise CheckpointError(f"{folder}: reads back as another drafter: {'; '.join(misfits)}")
    for name, found in drafter.weights().items():
        if not torch.equal(found, needed[name].float()):
            raise CheckpointError(f"{folder}: tensor {name}: read back other bytes than were written; the disk is at fault")
