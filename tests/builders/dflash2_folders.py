"""Build drafters of DFlash 2 whose every number matters: runs, and folders written by hand, without the exporter."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from common import config as configuration
from common.config import Config
from tests.builders.parity_runs import TOML, make_target, save_run

SLIDING = "draft.layer_types=['sliding_attention','sliding_attention','sliding_attention']"
DFLASH2 = ("draft.kind=dflash2", "draft.conv_group_size=8", "draft.selector_rank=8", "draft.selector_top_k=4", SLIDING)


def make_dflash2_run(run_dir: Path, *overrides: str, layout: str = "z-lab") -> Path:
    """Make a run of DFlash 2 with its target, evaluation data, a checkpoint, and a folder in the place of its export."""
    run_dir.mkdir()
    make_target(run_dir / "target", "qwen3")
    (run_dir / "run.toml").write_text(TOML.format(target=run_dir / "target"))
    config, weights = save_run(run_dir, configuration.load(run_dir / "run.toml", [*DFLASH2, *overrides]))
    write_folder(run_dir / "export", config, weights, layout)
    return run_dir


def write_folder(folder: Path, config: Config, weights: dict[str, Tensor], layout: str) -> None:
    """Write weights and config.json as z-lab or speculators publish them."""
    folder.mkdir()
    tensors = {name: weight.bfloat16().contiguous() for name, weight in weights.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    draft = config.draft
    own: dict[str, Any] = {
        "conv_kernel_size": 2,
        "conv_group_size": draft.conv_group_size,
        "selector_rank": draft.selector_rank,
        "selector_top_k": draft.selector_top_k,
    }
    decoder, block = _decoder(config), {"block_size": draft.block_size, "mask_token_id": draft.mask_token_id}
    if layout == "z-lab":
        of_dflash = {**block, "target_layer_ids": draft.tap_layers, **own}
        content = {**decoder, "block_size": draft.block_size, "is_causal": draft.is_causal, "dflash_config": of_dflash}
    else:
        window = {"sliding_window_non_causal": not draft.is_causal, "sample_from_anchor": False}
        taps = {"aux_hidden_state_layer_ids": [layer + 1 for layer in draft.tap_layers]}
        nested = {"speculators_model_type": "dflash2", "transformer_layer_config": decoder}
        content = {**nested, **block, **own, **window, **taps, "draft_vocab_size": config.shape.vocab_size}
    content["architectures"] = ["DFlash2DraftModel"]
    (folder / "config.json").write_text(json.dumps(content))


def _decoder(config: Config) -> dict[str, Any]:
    """Return Qwen3's keys."""
    draft, shape = config.draft, config.shape
    sliding = "sliding_attention" in draft.layer_types
    return {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope_theta,
        "num_hidden_layers": draft.num_layers,
        "num_attention_heads": draft.num_attention_heads,
        "num_key_value_heads": draft.num_key_value_heads,
        "head_dim": draft.head_dim,
        "intermediate_size": draft.intermediate_size,
        "layer_types": list(draft.layer_types),
        "sliding_window": draft.sliding_window if sliding else None,
        "use_sliding_window": sliding,
        "num_target_layers": shape.num_hidden_layers,
    }
