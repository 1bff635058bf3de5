"""Drafters in the layouts of other projects: each gives an equal draft model, and misfits are named."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from common.actor.messages import Welcome
from common.config import Config
from common.drafter_files import fingerprint_drafter
from common.errors import CheckpointError
from services.drafter.folder.drafter_folder import load_drafter, read_drafter
from services.drafter.model.model import DraftModel
from services.drafter.training.optimizer import MasterAdamW
from services.drafter.training.resume import Checkpointer
from tests.builders.batches import BLOCK_SIZE, MASK_TOKEN, make_config

Content = dict[str, Any]
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "hidden_act": "silu",
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 5,
}
ZLAB = QWEN3 | {
    "architectures": ["DFlashDraftModel"],
    "block_size": BLOCK_SIZE,
    "dflash_config": {"block_size": BLOCK_SIZE, "mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 5]},
    "num_target_layers": 8,
    "rope_theta": 1e4,
    "rope_scaling": None,
}
SPECFORGE = QWEN3 | {  # the tap layers follow from its rule, the mask id is filled in at training
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"},
    "block_size": BLOCK_SIZE,
    "dflash_config": {"mask_token_id": None},
    "num_target_layers": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 6],
    "block_size": BLOCK_SIZE,
    "mask_token_id": MASK_TOKEN,
    "draft_vocab_size": 32,
    "sliding_window_non_causal": False,
    "transformer_layer_config": QWEN3 | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
}
TORCHSPEC = QWEN3 | {
    "model_type": "dflash",
    "num_target_layers": 2,
    "target_num_hidden_layers": 8,
    "target_layer_ids": [1, 5],
    "mask_token_id": MASK_TOKEN,
    "rope_theta": 1e4,
}
TORCHSPEC_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}
LAYOUTS = {"zlab": ZLAB, "specforge": SPECFORGE, "speculators": SPECULATORS, "torchspec": TORCHSPEC}


@pytest.fixture
def weights() -> dict[str, Tensor]:
    """No two tensors alike, in bfloat16 as they come."""
    generator = torch.Generator().manual_seed(1)
    names = DraftModel(make_config()).state_dict()
    return {name: torch.randn(weight.shape, generator=generator).bfloat16() for name, weight in names.items()}


def write(folder: Path, content: Content, weights: dict[str, Tensor], **extra: Tensor) -> Path:
    names = TORCHSPEC_NAMES if content is TORCHSPEC else {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    tensors = {names.get(name, name): weight for name, weight in weights.items()} | extra
    save_file(tensors, folder / "model.safetensors")
    return folder


def with_draft(config: Config, **draft: Any) -> Config:
    return msgspec.structs.replace(config, draft=msgspec.structs.replace(config.draft, **draft))


def with_shape(config: Config, **shape: Any) -> Config:
    return msgspec.structs.replace(config, target_shape=msgspec.structs.replace(config.shape, **shape))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_is_the_same_draft_model(tmp_path: Path, weights: dict[str, Tensor], name: str) -> None:
    extra = {"embed_tokens.weight": torch.ones(32, 32)} if name in ("speculators", "torchspec") else {}
    folder = write(tmp_path / "drafter", LAYOUTS[name], weights, **extra)
    config = make_config()
    drafter = read_drafter(folder)
    assert drafter.layout == {"zlab": "dflash", "specforge": "dflash"}.get(name, name)
    assert drafter.misfits(config) == []
    assert drafter.settings["tap_layers"] == [1, 5]
    model = load_drafter(folder, config)
    assert [mask.window for mask in model.masks] == [5, 0]
    assert {key: torch.equal(value, weights[key].float()) for key, value in model.state_dict().items()} == dict.fromkeys(
        weights, True
    )


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_run_begins_with_exactly_the_weights_of_every_layout(
    tmp_path: Path, weights: dict[str, Tensor], name: str, dtype: torch.dtype
) -> None:
    stored = {key: weight.to(dtype) * (1.0 if dtype is torch.bfloat16 else 1.001) for key, weight in weights.items()}
    folder = write(tmp_path / "drafter", LAYOUTS[name], stored)
    config = with_draft(make_config(), init=str(folder), init_fingerprint=fingerprint_drafter(folder))
    model = DraftModel(config)
    optimizer = MasterAdamW(model, config.train, num_steps=10, block_size=BLOCK_SIZE)
    checkpointer = Checkpointer(tmp_path / "run", config, Welcome(b"p" * 16, num_batches=10, num_steps=10), rank=1)
    assert checkpointer.resume(optimizer) == (0, None)
    masters = optimizer.master_weights()
    assert {key for key, weight in stored.items() if torch.equal(masters[key], weight.float())} == masters.keys()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_are_refused(tmp_path: Path, weights: dict[str, Tensor], bad: float) -> None:
    weights["fc.weight"][0, :2] = bad
    folder = write(tmp_path / "drafter", TORCHSPEC, weights)
    with pytest.raises(CheckpointError, match=r"tensor context_proj\.weight: needed finite numbers, found 2 others"):
        load_drafter(folder, make_config())


def test_every_misfit_is_named_at_once(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    content = ZLAB | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}, "rope_theta": 1e6, "vocab_size": 128}
    del weights["hidden_norm.weight"]
    folder = write(tmp_path / "drafter", content, weights | {"layers.0.self_attn.q_norm.weight": torch.ones(16)})
    assert read_drafter(folder).misfits(make_config()) == [
        "rope_parameters.rope_type: needed default, found yarn",
        "vocab_size: needed 32, found 128",
        "rope_theta: needed 10000.0, found 1000000.0",
        "tensor hidden_norm.weight: needed [32], found None",
        "tensor layers.0.self_attn.q_norm.weight: needed [8], found [16]",
    ]


def test_weights_in_several_files(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    folder = write(tmp_path / "drafter", ZLAB, weights)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{index % 2}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert torch.equal(load_drafter(folder, make_config()).fc.weight, weights["fc.weight"].float())


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (with_draft(make_config(), tap_layers=[2, 5]), "tap_layers: needed [2, 5], found [1, 5]"),
        (with_draft(make_config(), block_size=8), "block_size: needed 8, found 4"),
        (with_draft(make_config(), mask_token_id=30), "mask_token_id: needed 30, found 31"),
        (with_draft(make_config(), sliding_window=7), "sliding_window: needed 7, found 5"),
        (with_shape(make_config(), rope_theta=1e6), "rope_theta: needed 1000000.0, found 10000.0"),
        (with_shape(make_config(), vocab_size=40), "vocab_size: needed 40, found 32"),
        (with_shape(make_config(), num_hidden_layers=9), "num_hidden_layers: needed 9, found 8"),
        (with_shape(make_config(), hidden_size=16), "hidden_size: needed 16, found 32"),
        (make_config(head_dim=16), "tensor layers.1.self_attn.k_norm.weight: needed [16], found [8]"),
    ],
)
def test_a_setting_that_does_not_fit_the_run_is_named(
    tmp_path: Path, weights: dict[str, Tensor], config: Config, line: str
) -> None:
    folder = write(tmp_path / "drafter", ZLAB, weights)
    assert line in read_drafter(folder).misfits(config)
    with pytest.raises(CheckpointError, match="does not fit"):
        load_drafter(folder, config)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (ZLAB | {"attention_bias": True}, "attention_bias: needed False, found True"),
        (ZLAB | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_scaling.rope_type: needed default, found yarn"),
        (ZLAB | {"partial_rotary_factor": 0.25}, "partial_rotary_factor: needed 1.0, found 0.25"),
        (ZLAB | {"rope_parameters": {"rope_theta": 1e6}}, "rope_theta: needed one value, found [1000000.0, 10000.0]"),
        (ZLAB | {"block_size": 8}, "block_size: needed one value, found [4, 8]"),
        (ZLAB | {"is_causal": False}, "is_causal: needed true in sliding layers only, found False"),
        (ZLAB | {"is_causal": True}, "is_causal: needed true in sliding layers only, found True"),
        (ZLAB | {"use_sliding_window": False}, "use_sliding_window: needed True, found False"),
        (SPECULATORS | {"sliding_window_non_causal": True}, "is_causal: needed true in sliding layers only, found False"),
        (SPECULATORS | {"sample_from_anchor": True}, "sample_from_anchor: needed False, found True"),
        (SPECULATORS | {"draft_vocab_size": 16}, "draft_vocab_size: needed 32, found 16"),
    ],
)
def test_a_setting_that_this_draft_model_does_not_compute_is_named(
    tmp_path: Path, weights: dict[str, Tensor], content: Content, line: str
) -> None:
    assert line in read_drafter(write(tmp_path / "drafter", content, weights)).misfits(make_config())


def test_missing_and_superfluous_tensors_are_named(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    del weights["layers.1.self_attn.k_norm.weight"]
    folder = write(tmp_path / "drafter", ZLAB, weights, **{"markov_head.markov_w1.weight": torch.ones(3, 2)})
    assert read_drafter(folder).misfits(make_config()) == [
        "tensor layers.1.self_attn.k_norm.weight: needed [8], found None",
        "tensor markov_head.markov_w1.weight: needed None, found [3, 2]",
    ]


def test_a_drafter_that_does_not_fit_can_be_built_by_its_own_settings(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    folder = write(tmp_path / "drafter", ZLAB | {"rope_theta": 1e6, "sliding_window": 3}, weights)
    drafter = read_drafter(folder)
    config = drafter.on(make_config())
    assert (config.shape.rope_theta, config.draft.sliding_window, config.draft.tap_layers) == (1e6, 3, [1, 5])
    assert drafter.misfits(config) == []
    assert (drafter.build(make_config()).rope_theta, [mask.window for mask in drafter.build(make_config()).masks]) == (
        1e6,
        [3, 0],
    )


def test_folders_that_cannot_be_read(tmp_path: Path, weights: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: cannot be read"):
        read_drafter(tmp_path)
    folder = write(tmp_path / "drafter", ZLAB, weights)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"needed model\.safetensors"):
        read_drafter(folder)
    for text, found in (("{", "not JSON"), ("[]", "needed an object, found list")):
        (folder / "config.json").write_text(text)
        with pytest.raises(CheckpointError, match=found):
            read_drafter(folder)
