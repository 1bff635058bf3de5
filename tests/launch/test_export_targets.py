"""Exports for every kind of target: what config.json says, the rotation that engines make of it, and the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, PreTrainedTokenizerFast
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from common import config as configuration
from launch import export
from services.drafter.folder.checkpoint import draft_identity, load_weights
from services.drafter.folder.drafter_folder import read_drafter
from services.drafter.model.frozen import load_embedding_and_head
from services.drafter.model.layers import rotation
from tests.builders.parity_runs import make_run

CPU = torch.device("cpu")
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "rope_theta": 5e5}
PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e4}
HYBRID_PARTIAL = {"rope_type": "default", "partial_rotary_factor": 0.25, "rope_theta": 1e7, "mrope_section": [1, 0, 0]}
KINDS: dict[str, tuple[str, list[str], dict[str, Any], dict[str, Any]]] = {
    "tied heads": ("llama", [], {"tie_word_embeddings": True}, {"tie_word_embeddings": False, "rope_theta": 1e6}),
    "nested text_config": (
        "nested",
        [],
        {"rope_parameters": HYBRID_PARTIAL, "intermediate_size": 40},
        {"num_target_layers": 5, "intermediate_size": 40, "rope_theta": 1e7, "head_dim": 8, "model_type": "qwen3"},
    ),
    "YaRN": (
        "qwen3",
        [],
        {"rope_parameters": YARN},
        {"rope_theta": 5e5, "rope_scaling": None, "max_position_embeddings": 4096},
    ),
    "partial rotary": ("glm", [], {"rope_parameters": PARTIAL}, {"rope_theta": 1e4, "head_dim": 8}),
    "other head sizes": (
        "qwen3",
        ["draft.head_dim=16", "draft.num_attention_heads=6", "draft.num_key_value_heads=3", "draft.intermediate_size=24"],
        {},
        {"head_dim": 16, "num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 24, "hidden_size": 32},
    ),
    "padded vocabulary": ("qwen3", ["draft.mask_token_id=78"], {"vocab_size": 80}, {"vocab_size": 80}),
}


@pytest.mark.parametrize("layout", export.LAYOUTS)
@pytest.mark.parametrize(("model_type", "overrides", "shape", "expected"), KINDS.values(), ids=KINDS)
def test_export_of_a_drafter_for(
    tmp_path: Path, model_type: str, overrides: list[str], shape: dict[str, Any], expected: dict[str, Any], layout: Any
) -> None:
    if layout == "speculators":  # which holds layers of one kind
        overrides = [*overrides, "draft.layer_types=[]"]
    run_dir = make_run(tmp_path / "run", *overrides, model_type=model_type, **shape)
    config, checkpoint = configuration.read(run_dir), export.find_checkpoint(run_dir, None, best=False)
    out = tmp_path / "out"
    export.run(run_dir, out, checkpoint, layout)

    written = json.loads((out / "config.json").read_text())
    decoder = written if layout == "dflash" else written["transformer_layer_config"]
    only_dflash = {"num_target_layers"}
    found = {key: value for key, value in expected.items() if layout == "dflash" or key not in only_dflash}
    assert {key: decoder[key] for key in found} == found
    assert decoder["rope_parameters"] == {"rope_type": "default", "rope_theta": config.shape.rope_theta}
    assert not any(word in json.dumps(written) for word in ("yarn", "partial_rotary", "mrope"))
    assert read_drafter(out).misfits(config) == []

    parsed: Any = AutoConfig.for_model(**decoder)  # what an engine builds its rotary embedding from
    embedding: Any = Qwen3RotaryEmbedding(parsed)
    positions = torch.arange(200)
    cosine, sine = embedding(torch.zeros(1, 1, 1), positions[None])
    trained = rotation(positions, config.draft.head_dim, config.shape.rope_theta)
    assert torch.allclose(cosine[0], trained[0], atol=1e-5) and torch.allclose(sine[0], trained[1], atol=1e-5)

    _, weights = load_weights(checkpoint, draft_identity(config))
    built = read_drafter(out).build(config).state_dict()
    assert {name for name, weight in weights.items() if torch.equal(built[name], weight.bfloat16().float())} == built.keys()


def test_a_padded_head_is_used_whole(tmp_path: Path) -> None:
    """More rows than the tokenizer has tokens: the head is not cut, and the mask id may be one that text never contains."""
    run_dir = make_run(tmp_path / "run", "draft.mask_token_id=78", vocab_size=80)
    vocabulary: Any = Tokenizer(models.WordLevel({f"w{index}": index for index in range(64)}, unk_token="w0"))
    fast: Any = PreTrainedTokenizerFast
    fast(tokenizer_object=vocabulary, unk_token="w0").save_pretrained(run_dir / "target")
    config = configuration.read(run_dir)
    assert load_embedding_and_head(config, CPU)[1].shape == (80, 32)
    export.run(run_dir, tmp_path / "out", export.find_checkpoint(run_dir, None, best=False), "dflash")
    settings = read_drafter(tmp_path / "out").settings
    assert (settings["vocab_size"], settings["mask_token_id"]) == (80, 78)


def test_a_tied_target_needs_no_head_of_its_own(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", model_type="llama", tie_word_embeddings=True)
    embedding, head = load_embedding_and_head(configuration.read(run_dir), CPU)
    assert head is embedding
