"""The export has the names and shapes that engines load, and reloads to the same model."""

import json
import resource
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig

from common.config import Config
from common.errors import CheckpointError
from launch.decoding.answer import Limits
from launch.decoding.block_drafter import BlockDrafter
from launch.decoding.speculate import speculate
from services.drafter.folder.drafter_folder import load_drafter
from services.drafter.folder.engine_config import LayoutName, engine_config
from services.drafter.folder.export import export
from services.drafter.model.model import DraftModel
from tests.builders.batches import make_evaluation
from tests.builders.targets import MASK_TOKEN, make_target

NORMS = ["input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm"]
ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LAYER = [*NORMS, *ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.fixture
def tiny(tmp_path: Path) -> tuple[Config, Any]:
    return make_target(tmp_path, "qwen3")


def spread(model: DraftModel) -> DraftModel:
    """Weights of every size, norms too, so that no two tensors are alike."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model


def test_names_and_shapes_of_five_layers(tmp_path: Path) -> None:
    layers = ["draft.num_layers=5", "draft.layer_types=[]", "draft.head_dim=16", "draft.tap_layers=[0, 1, 3]"]
    config, _ = make_target(tmp_path, "llama", *layers)
    export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None)
    with safe_open(tmp_path / "out/model.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = {f"layers.{index}.{name}.weight" for index in range(5) for name in LAYER}
    assert tensors.keys() == names | {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert len(tensors) == 58
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert tensors["fc.weight"].shape == (32, 3 * 32)
    assert tensors["layers.4.self_attn.q_proj.weight"].shape == (4 * 16, 32)
    assert tensors["layers.4.self_attn.k_proj.weight"].shape == (2 * 16, 32)
    assert tensors["layers.4.self_attn.o_proj.weight"].shape == (32, 4 * 16)
    assert tensors["layers.4.self_attn.q_norm.weight"].shape == (16,)
    assert tensors["layers.4.mlp.down_proj.weight"].shape == (32, 48)


@pytest.mark.parametrize("layout", ["dflash", "speculators"])
@pytest.mark.parametrize(
    ("options", "scales", "stated"),
    [
        ([], {"logit_scale": 0.0625}, {"logit_scale": 0.0625}),
        (["draft.kind=dflash2"], {"logit_scale": 0.0625}, {"output_multiplier": 0.0625}),
        (
            ["draft.kind=dflash2"],
            {"embedding_scale": 6.5, "logit_softcap": 30.0},
            {"input_embedding_scale": 6.5, "final_logit_softcapping": 30.0},
        ),
    ],
)
def test_what_the_target_scales_is_stated_where_engines_read_it(
    layout: LayoutName, options: list[str], scales: dict[str, float], stated: dict[str, float], tmp_path: Path
) -> None:
    config, _ = make_target(tmp_path, "llama", "draft.layer_types=[]", *options)
    config = msgspec.structs.replace(config, target_shape=msgspec.structs.replace(config.shape, **scales))
    export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None, layout=layout)
    content = json.loads((tmp_path / "out/config.json").read_text())
    part = content if layout == "speculators" else content["dflash_config"]
    if not options:
        part = content["transformer_layer_config"] if layout == "speculators" else content
    found = {key: value for key, value in part.items() if "scale" in key or "softcap" in key or "multiplier" in key}
    assert found == stated
    assert ("times 6.5: vLLM reads" in (tmp_path / "out/README.md").read_text()) == ("embedding_scale" in scales)
    load_drafter(tmp_path / "out", config)
    unscaled = msgspec.structs.replace(config, target_shape=msgspec.structs.replace(config.shape, **dict.fromkeys(scales, 2.0)))
    with pytest.raises(CheckpointError, match=f"{next(iter(scales))}: needed 2.0, found {next(iter(scales.values()))}"):
        load_drafter(tmp_path / "out", unscaled)


@torch.no_grad()
def test_reloads_to_the_rounded_weights_and_the_same_blocks(tmp_path: Path, tiny: tuple[Config, Any]) -> None:
    config, target = tiny
    draft = spread(DraftModel(config))
    export(tmp_path / "out", config, draft.state_dict(), step=1, evaluation=None)
    reloaded = load_drafter(tmp_path / "out", config)
    rounded = DraftModel(config)
    rounded.load_state_dict({name: weight.bfloat16().float() for name, weight in draft.state_dict().items()})

    taps = torch.randn(9, 2, 32, generator=torch.Generator().manual_seed(3))
    outputs = []
    for model in (draft, rounded, reloaded):
        drafter = BlockDrafter(model, config.draft, target)
        drafter.append(taps)
        outputs.append(target.lm_head(drafter.hidden(4)))
    exact, rounded_logits, reloaded_logits = outputs
    assert torch.equal(reloaded_logits, rounded_logits)  # bit for bit: rounding to bfloat16 is the only loss
    assert 0 < (reloaded_logits - exact).abs().max() < 0.1 * exact.std()
    answers = [speculate(target, draft, config.draft, [1, 2, 3], Limits(16)) for draft in (rounded, reloaded)]
    assert answers[0] == answers[1]


def test_config_is_what_engines_read(tmp_path: Path, tiny: tuple[Config, Any]) -> None:
    config, _ = tiny
    export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None)
    found = json.loads((tmp_path / "out/config.json").read_text())
    assert found["architectures"] == ["DFlashDraftModel"]
    assert "auto_map" not in found  # it would name a file of code that is not in the folder
    assert found["num_target_layers"] == 4
    assert found["block_size"] == 4
    assert found["dflash_config"] == {"block_size": 4, "mask_token_id": MASK_TOKEN, "target_layer_ids": [0, 2]}
    assert found["rope_theta"] == found["rope_parameters"]["rope_theta"] == 10000.0
    assert found["rope_scaling"] is None
    assert found["tie_word_embeddings"] is False
    assert found["dtype"] == "bfloat16"
    parsed = AutoConfig.from_pretrained(tmp_path / "out")
    assert parsed.model_type == "qwen3"
    assert parsed.layer_types == ["sliding_attention", "full_attention"]
    assert parsed.sliding_window == 6
    assert parsed.rope_parameters["rope_theta"] == 10000.0
    assert parsed.num_hidden_layers == 2


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(("kind", "non_causal"), [(FULL, True), (SLIDING, False)])
def test_the_speculators_layout_states_once_whether_blocks_are_causal(tmp_path: Path, kind: str, non_causal: bool) -> None:
    config, _ = make_target(tmp_path, "qwen3", f"draft.layer_types=['{kind}', '{kind}']")
    export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None, layout="speculators")
    assert json.loads((tmp_path / "out/config.json").read_text())["sliding_window_non_causal"] is non_causal
    assert [mask.window for mask in load_drafter(tmp_path / "out", config).masks] == [6 * (kind == SLIDING)] * 2


def test_the_speculators_layout_refuses_a_mix_of_layers(tmp_path: Path, tiny: tuple[Config, Any]) -> None:
    config, _ = tiny
    needed = "needed layers that are all causal or all not for the speculators layout, found full_attention and sliding_att"
    with pytest.raises(CheckpointError, match=needed):
        export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None, layout="speculators")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("folder", "stated", "name"),
    [
        ("Qwen3-8B", None, "Qwen3-8B"),
        ("Qwen3-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("Qwen3-8B", "/somebody/else/checkpoint-9", "Qwen3-8B"),
        ("Qwen3-8B", "../checkpoint-9", "Qwen3-8B"),
        ("models--Qwen--Qwen3-8B/snapshots/0f3ab1", None, "Qwen/Qwen3-8B"),
    ],
)
def test_the_target_has_its_public_name(tmp_path: Path, folder: str, stated: str | None, name: str) -> None:
    config, _ = make_target(tmp_path, "qwen3", f"draft.layer_types=['{FULL}', '{FULL}']")
    target = tmp_path / folder
    target.mkdir(parents=True)
    (target / "config.json").write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "_name_or_path": stated}))
    config = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(target)))
    export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None, layout="speculators")
    written = json.loads((tmp_path / "out/config.json").read_text())
    verifier = {"name_or_path": name, "architectures": ["Qwen3ForCausalLM"]}
    assert written["speculators_config"]["verifier"] == verifier
    assert str(tmp_path) not in json.dumps(written)
    assert f"# DFlash drafter for {name}\n" in (tmp_path / "out/README.md").read_text()


def test_the_card_states_the_measured_acceptance(tmp_path: Path, tiny: tuple[Config, Any]) -> None:
    config, _ = tiny
    for measured, words in ((make_evaluation(120, 2.345678), "2.346 tokens per"), (None, "not measured")):
        export(tmp_path / "out", config, DraftModel(config).state_dict(), step=120, evaluation=measured)
        card = (tmp_path / "out/README.md").read_text()
        assert f"acceptance length: {words}" in card
        assert "Optimizer steps: 120" in card
        assert '"num_speculative_tokens": 3' in card
        assert str(tmp_path) not in card
    assert not list(tmp_path.glob("*.partial"))


def test_wrong_weights_are_refused(tmp_path: Path, tiny: tuple[Config, Any]) -> None:
    config, _ = tiny
    weights = DraftModel(config).state_dict()
    other = {**weights, "norm.weight": torch.ones(5)}
    with pytest.raises(CheckpointError, match=r"norm\.weight: needed \[32\], found \[5\]"):
        export(tmp_path / "out", config, other, step=1, evaluation=None)
    with pytest.raises(CheckpointError, match=r"tensor embed_tokens\.weight: needed None, found \[1\]"):
        export(tmp_path / "out", config, {**weights, "embed_tokens.weight": torch.ones(1)}, step=1, evaluation=None)
    del other["fc.weight"]
    with pytest.raises(CheckpointError, match=r"fc\.weight: needed \[32, 64\], found None"):
        export(tmp_path / "out", config, other, step=1, evaluation=None)
    assert not (tmp_path / "out").exists()


ROPE = {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
WRONG_CONTENTS: dict[str, dict[str, Any]] = {
    "rope_theta": ROPE,
    "rms_norm_eps": {"rms_norm_eps": 0.1},
    "mask_token_id": {"dflash_config": {"block_size": 4, "mask_token_id": 1, "target_layer_ids": [0, 2]}},
    "tap_layers": {"dflash_config": {"block_size": 4, "mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 3]}},
    "layer_types": {"layer_types": ["full_attention", "sliding_attention"]},
    "sliding_window": {"sliding_window": 7},
    "num_attention_heads": {"num_attention_heads": 8},
}


@pytest.mark.parametrize("key", WRONG_CONTENTS)
def test_an_export_that_states_another_drafter_is_refused_and_the_earlier_one_stays(
    tmp_path: Path, tiny: tuple[Config, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = tiny
    export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None)
    monkeypatch.setattr(
        "services.drafter.folder.export.engine_config", lambda *given: engine_config(*given) | WRONG_CONTENTS[key]
    )
    with pytest.raises(CheckpointError, match=f"reads back as another drafter: .*{key}: needed"):
        export(tmp_path / "out", config, DraftModel(config).state_dict(), step=2, evaluation=None)
    assert "steps: 1\n" in (tmp_path / "out/README.md").read_text()
    assert not list(tmp_path.glob("*.partial"))


def test_an_export_that_holds_other_weights_is_refused(
    tmp_path: Path, tiny: tuple[Config, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, _ = tiny
    names = "layers.0.self_attn.k_norm.weight", "layers.0.self_attn.q_norm.weight"

    def save_swapped(weights: dict[str, torch.Tensor], *rest: Any, **more: Any) -> None:
        save_file(weights | {names[0]: weights[names[1]], names[1]: weights[names[0]]}, *rest, **more)

    monkeypatch.setattr("services.drafter.folder.export.save_file", save_swapped)
    with pytest.raises(CheckpointError, match=r"tensor layers\.0\.self_attn\.[kq]_norm\.weight: read back other bytes"):
        export(tmp_path / "out", config, spread(DraftModel(config)).state_dict(), step=1, evaluation=None)
    assert not (tmp_path / "out").exists()


def test_export_of_another_draft_is_refused(tmp_path: Path, tiny: tuple[Config, Any]) -> None:
    config, _ = tiny
    export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None)
    other = msgspec.structs.replace(config, draft=msgspec.structs.replace(config.draft, block_size=9))
    with pytest.raises(CheckpointError, match="block_size: needed 9, found 4"):
        load_drafter(tmp_path / "out", other)
    (tmp_path / "out/model.safetensors").write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: needed a safetensors file"):
        load_drafter(tmp_path / "out", config)


def test_a_folder_that_is_not_an_export_is_refused(tmp_path: Path, tiny: tuple[Config, Any]) -> None:
    config, _ = tiny
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match="found something else"):
        export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None)
    with pytest.raises(CheckpointError, match="found something else"):
        export(tmp_path / "target", config, DraftModel(config).state_dict(), step=1, evaluation=None)
    assert (tmp_path / "out/thesis.txt").read_text() == "years of work"


def test_a_full_disk_leaves_the_old_export(tmp_path: Path, tiny: tuple[Config, Any]) -> None:
    config, _ = tiny
    export(tmp_path / "out", config, DraftModel(config).state_dict(), step=1, evaluation=None)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large"):
            export(tmp_path / "out", config, DraftModel(config).state_dict(), step=2, evaluation=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "steps: 1\n" in (tmp_path / "out/README.md").read_text()
    load_drafter(tmp_path / "out", config)
    assert not list(tmp_path.glob("*.partial"))
