"""DFlash 2 on disk: what others write is read, what is written is what engines read, and a DFlash is a start for it."""

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
from services.drafter.folder.checkpoint import DraftIdentity, draft_identity
from services.drafter.folder.drafter_folder import load_drafter, read_drafter
from services.drafter.folder.engine_config import LayoutName
from services.drafter.folder.export import export
from services.drafter.model.anchors import choose_blocks
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_hidden
from services.drafter.training.optimizer import MasterAdamW
from services.drafter.training.resume import Checkpointer
from tests.builders.batches import BLOCK_SIZE, MASK_TOKEN, dflash2, frozen_weights, make_batch, make_config, randomise
from tests.builders.targets import make_target

SLIDING = ["sliding_attention", "sliding_attention"]
CODEBOOKS = ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
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
    "layer_types": SLIDING,
    "sliding_window": 5,
    "rope_theta": 1e4,
}
ADDITIONS = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4}
OWN = {"block_size": BLOCK_SIZE, "mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 5], **ADDITIONS}
ZLAB = QWEN3 | {
    "architectures": ["DFlash2DraftModel"],
    "is_causal": False,
    "block_size": BLOCK_SIZE,
    "dflash_config": OWN,
    "num_target_layers": 8,
}
SPECULATORS = ADDITIONS | {
    "architectures": ["DFlash2DraftModel"],
    "speculators_model_type": "dflash2",
    "aux_hidden_state_layer_ids": [2, 6],
    "block_size": BLOCK_SIZE,
    "mask_token_id": MASK_TOKEN,
    "draft_vocab_size": 32,
    "sample_from_anchor": False,
    "sliding_window_non_causal": True,
    "transformer_layer_config": QWEN3,
}
LAYOUTS = {"zlab": ZLAB, "automodel": ZLAB | {"architectures": ["Qwen3DFlash2DraftModel"]}, "speculators": SPECULATORS}


def make_dflash2() -> Config:
    return dflash2(make_config(SLIDING))


def write(folder: Path, content: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(content))
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_others_write_is_read(tmp_path: Path, name: str) -> None:
    config = make_dflash2()
    weights = randomise(DraftModel(config)).state_dict()
    stored = {f"{name}.weight" if name in CODEBOOKS else name: weight for name, weight in weights.items()}
    for number, tensors in enumerate((weights, stored)):
        drafter = read_drafter(write(tmp_path / str(number), LAYOUTS[name], tensors))
        assert drafter.misfits(config) == []
        assert drafter.on(make_config(SLIDING)).draft == config.draft
        loaded = load_drafter(drafter.folder, config).state_dict()
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[key], weight) for key, weight in weights.items())


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (ZLAB | {"is_causal": True}, "is_causal: needed False, found true in sliding layers only"),
        (SPECULATORS | {"sliding_window_non_causal": False}, "is_causal: needed False, found true in sliding layers only"),
        (ZLAB | {"dflash_config": OWN | {"selector_top_k": 5}}, "selector_top_k: needed 4, found 5"),
        (ZLAB | {"dflash_config": OWN | {"conv_kernel_size": 3}}, "dflash_config.conv_kernel_size: needed 2, found 3"),
        (ZLAB | {"dflash_config": OWN | {"output_multiplier": 0.5}}, "logit_scale: needed 1.0, found 0.5"),
        (
            ZLAB | {"dflash_config": OWN | {"final_logit_softcapping": 30.0}},
            "logit_softcap: needed 0.0, found 30.0",
        ),
        (SPECULATORS | {"input_embedding_scale": 2.0}, "embedding_scale: needed 1.0, found 2.0"),
        (ZLAB | {"dflash_config": OWN | {"causal": True}}, "is_causal: needed one value, found [False, True]"),
    ],
)
def test_what_it_does_not_compute_is_named(tmp_path: Path, content: dict[str, Any], line: str) -> None:
    config = make_dflash2()
    assert line in read_drafter(write(tmp_path / "drafter", content, DraftModel(config).state_dict())).misfits(config)


def test_five_layers_are_81_tensors(tmp_path: Path) -> None:
    kinds = ["sliding_attention"] * 5
    options = ["draft.kind=dflash2", "draft.num_layers=5", f"draft.layer_types={kinds}", "draft.conv_group_size=8"]
    config, _ = make_target(tmp_path, "qwen3", *options)
    export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None)
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert len(tensors) == 81
    assert tensors["layers.4.mlp_conv.base_kernel"].shape == (2, 2, 32)
    assert tensors["layers.4.attention_conv.kernel_projection.weight"].shape == (2 * 2 * 32 // 8, 32)
    assert tensors["candidate_selector.hidden_projection.weight"].shape == (256, 32)
    assert all(name in tensors and f"{name}.weight" not in tensors for name in CODEBOOKS)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
def test_config_is_what_engines_read(tmp_path: Path, layout: LayoutName) -> None:
    options = [f"draft.layer_types={SLIDING}", "draft.kind=dflash2", "draft.conv_group_size=8", "draft.selector_top_k=6"]
    config, _ = make_target(tmp_path, "qwen3", *options)
    weights = randomise(DraftModel(config)).state_dict()
    export(tmp_path / "out", config, weights, step=1, evaluation=None, layout=layout)
    found = json.loads((tmp_path / "out/config.json").read_text())
    own = found["dflash_config"] if layout == "dflash" else found
    additions = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 256, "selector_top_k": 6}
    assert {key: own[key] for key in additions} == additions
    assert found["architectures"] == ["DFlash2DraftModel"]
    if layout == "dflash":
        assert (found["is_causal"], found["block_size"], own["block_size"]) == (False, 4, 4)
    else:
        assert (found["speculators_model_type"], found["sliding_window_non_causal"]) == ("dflash2", True)
        assert (found["sample_from_anchor"], found["aux_hidden_state_layer_ids"]) == (False, [1, 3])
    assert "vLLM 0.28" in (tmp_path / "out/README.md").read_text() or layout == "speculators"
    reloaded = load_drafter(tmp_path / "out", config).state_dict()
    assert all(torch.equal(reloaded[name], weight.bfloat16().float()) for name, weight in weights.items())


def begin(folder: Path, config: Config, run_dir: Path) -> MasterAdamW:
    """Return the optimizer of a run that begins from a folder."""
    changed = {"init": str(folder), "init_fingerprint": fingerprint_drafter(folder)}
    config = msgspec.structs.replace(config, draft=msgspec.structs.replace(config.draft, **changed))
    optimizer = MasterAdamW(DraftModel(config), config.train, num_steps=10, block_size=BLOCK_SIZE)
    Checkpointer(run_dir, config, Welcome(b"p" * 16, num_batches=10, num_steps=10), rank=1).resume(optimizer)
    return optimizer


def test_a_dflash_is_a_start_that_computes_the_same(tmp_path: Path) -> None:
    config = make_dflash2()
    plain = msgspec.structs.replace(config, draft=msgspec.structs.replace(config.draft, kind="dflash"))
    trained = randomise(DraftModel(plain))
    own = {key: value for key, value in OWN.items() if key not in ADDITIONS}
    content = ZLAB | {"architectures": ["DFlashDraftModel"], "dflash_config": own}
    folder = write(tmp_path / "dflash", content, trained.state_dict())
    started = DraftModel(config)
    started.load_state_dict(begin(folder, config, tmp_path / "run").master_weights())
    batch, (embed, _) = make_batch([9, 5]), frozen_weights()
    blocks = choose_blocks(batch, 0, config)
    assert torch.equal(block_hidden(started, embed, batch, blocks, config), block_hidden(trained, embed, batch, blocks, plain))
    fresh = DraftModel(config).state_dict()
    assert all(torch.equal(started.state_dict()[name], fresh[name]) for name in fresh.keys() - trained.state_dict().keys())

    causal = write(tmp_path / "causal", content | {"is_causal": True}, trained.state_dict())
    with pytest.raises(CheckpointError, match="is_causal: needed False, found true in sliding layers only"):
        begin(causal, config, tmp_path / "run")


def test_a_dflash2_is_no_start_for_a_dflash(tmp_path: Path) -> None:
    folder = write(tmp_path / "dflash2", ZLAB, DraftModel(make_dflash2()).state_dict())
    with pytest.raises(CheckpointError, match="kind: needed dflash, found dflash2"):
        begin(folder, make_config(SLIDING), tmp_path / "run")


def test_a_record_from_before_dflash2_is_that_of_a_dflash() -> None:
    identity = draft_identity(make_config())
    old = msgspec.to_builtins(identity)
    for key in ("is_causal", "kind", *(key for key in ADDITIONS if key != "conv_kernel_size")):
        del old[key]
    assert msgspec.convert(old, DraftIdentity) == identity
    assert draft_identity(make_dflash2()) != draft_identity(dflash2(make_config(SLIDING), selector_top_k=5))
