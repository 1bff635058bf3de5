"""The draft model: names, initial bits, and the inputs that its blocks depend on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

from services.drafter.kernels.key_runs import KeyRuns
from services.drafter.model.anchors import Blocks, all_blocks
from services.drafter.model.attention import DenseAttention
from services.drafter.model.batch import PackedBatch
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_hidden
from tests.builders.batches import BLOCK_SIZE, MASK_TOKEN, document_alone, frozen_weights, make_batch, make_config

LAYERS = {
    "full": ["full_attention"],
    "sliding": ["sliding_attention"],
    "mixed": ["sliding_attention", "sliding_attention", "full_attention"],
}


def hidden_of(model: DraftModel, batch: PackedBatch, blocks: Blocks) -> Tensor:
    with torch.no_grad():
        return block_hidden(model, frozen_weights()[0], batch, blocks, make_config()).view(len(blocks.anchors), BLOCK_SIZE, -1)


def wide_model(layer_types: list[Any]) -> DraftModel:
    """Larger weights than the initial ones, so that every dependence is far larger than rounding."""
    model = DraftModel(make_config(layer_types, anchors_per_batch=32))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10.0)
    return model


def test_names_are_those_of_the_exported_file() -> None:
    names = set(DraftModel(make_config(LAYERS["mixed"])).state_dict())
    in_layer = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    in_layer += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "input_layernorm", "post_attention_layernorm"]
    expected = {f"layers.{layer}.{name}.weight" for layer in range(3) for name in in_layer}
    assert names == expected | {"fc.weight", "hidden_norm.weight", "norm.weight"}


def test_initial_weights_come_from_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = DraftModel(make_config()).state_dict()
    torch.manual_seed(2)
    second = DraftModel(make_config())
    assert all(torch.equal(first[name], tensor) for name, tensor in second.state_dict().items())
    second.initialise(4)
    assert not torch.equal(first["fc.weight"], second.fc.weight)
    assert first["fc.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(second.norm.weight, torch.ones(32))


@pytest.mark.parametrize("kind", LAYERS)
def test_nothing_at_or_after_the_anchor_or_of_another_document_is_seen(kind: str) -> None:
    model, batch = wide_model(LAYERS[kind]), make_batch([9, 12, 5])
    blocks = next(all_blocks(batch, make_config(anchors_per_batch=32)))
    before = hidden_of(model, batch, blocks)
    random = np.random.default_rng(1)
    for block in np.flatnonzero(blocks.valid):
        anchor, start = blocks.anchors[block], batch.cu_seqlens[blocks.documents[block]]
        unseen = np.ones(len(batch.input_ids), dtype=bool)
        unseen[start:anchor] = False
        features = batch.hidden_states.clone()
        features[torch.from_numpy(unseen)] = 100.0
        tokens = np.where(np.arange(len(unseen)) == anchor, batch.input_ids, random.integers(0, MASK_TOKEN, len(unseen)))
        changed = replace(batch, hidden_states=features, input_ids=tokens)
        after = hidden_of(model, changed, next(all_blocks(changed, make_config(anchors_per_batch=32))))
        torch.testing.assert_close(after[block], before[block], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "window"), [("full", 1000), ("sliding", 5)])
def test_every_visible_feature_and_the_anchor_token_are_seen(kind: str, window: int) -> None:
    model, batch = wide_model(LAYERS[kind]), make_batch([14, 12])
    blocks = next(all_blocks(batch, make_config(anchors_per_batch=32)))
    before = hidden_of(model, batch, blocks)
    for row in range(len(batch.input_ids)):
        features = batch.hidden_states.clone()
        features[row] = -features[row]
        change = (hidden_of(model, replace(batch, hidden_states=features), blocks) - before).abs().amax(-1).numpy()
        own = blocks.documents == np.searchsorted(batch.cu_seqlens, row, side="right") - 1
        rows_of_slots = blocks.anchors[:, None] + np.arange(BLOCK_SIZE)
        visible = (own & (row < blocks.anchors))[:, None] & (row >= rows_of_slots - (window - 1)) & blocks.valid[:, None]
        assert (change[visible] > 1e-4).all()
        assert (change[~visible] <= 1e-6).all()
    other_token = replace(blocks, anchor_tokens=(blocks.anchor_tokens + 1) % MASK_TOKEN)
    changed = (hidden_of(model, batch, other_token) - before).abs().amax(-1)
    assert (changed[torch.from_numpy(blocks.valid)] > 1e-4).all()


@pytest.mark.parametrize("kind", LAYERS)
def test_packed_documents_equal_each_document_alone(kind: str) -> None:
    model, batch, config = wide_model(LAYERS[kind]), make_batch([9, 12, 5]), make_config(anchors_per_batch=32)
    blocks = next(all_blocks(batch, config))
    packed = hidden_of(model, batch, blocks)
    for document in range(3):
        alone = document_alone(batch, document)
        own_blocks = next(all_blocks(alone, config))
        own = hidden_of(model, alone, own_blocks)[torch.from_numpy(own_blocks.valid)]
        of_document = torch.from_numpy(blocks.valid & (blocks.documents == document))
        torch.testing.assert_close(packed[of_document], own, rtol=0, atol=1e-5)


def test_a_block_depends_on_its_own_document() -> None:
    model, batch = wide_model(LAYERS["full"]), make_batch([9, 12])
    blocks = next(all_blocks(batch, make_config(anchors_per_batch=32)))
    as_one = replace(blocks, documents=np.zeros_like(blocks.documents))
    changed = (hidden_of(model, batch, as_one) - hidden_of(model, batch, blocks)).abs().amax((1, 2)).numpy()
    assert (changed[blocks.valid & (blocks.documents == 1)] > 1e-4).all()


def test_positions_matter_relative_to_the_anchor() -> None:
    model, batch = wide_model(LAYERS["full"]), make_batch([12])
    blocks = next(all_blocks(batch, make_config(anchors_per_batch=32)))
    before = hidden_of(model, batch, blocks)
    shifted = hidden_of(model, replace(batch, position_ids=batch.position_ids + 5), blocks)
    torch.testing.assert_close(shifted, before, rtol=0, atol=1e-4)
    stretched = hidden_of(model, replace(batch, position_ids=batch.position_ids * 2), blocks)
    assert (stretched - before).abs().max() > 1e-2


def test_padding_blocks_change_nothing_and_stay_finite() -> None:
    model, batch = wide_model(LAYERS["mixed"]), make_batch([9, 5])
    few = next(all_blocks(batch, make_config(anchors_per_batch=8)))
    many = next(all_blocks(batch, make_config(anchors_per_batch=32)))
    assert few.valid.all()
    assert not many.valid[8:].all()
    with_padding = hidden_of(model, batch, many)
    assert with_padding.isfinite().all()
    torch.testing.assert_close(with_padding[:8], hidden_of(model, batch, few), rtol=0, atol=1e-5)


def test_a_layer_without_context_is_a_layer_of_qwen3() -> None:
    config = make_config(["sliding_attention"], sliding_window=100)
    model = wide_model(["sliding_attention"])
    reference_config = Qwen3Config(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_hidden_layers=1
    )
    reference_config.rope_parameters = {"rope_type": "default", "rope_theta": config.shape.rope_theta}
    reference_config._attn_implementation = "eager"
    layer = Qwen3DecoderLayer(reference_config, 0)
    layer.load_state_dict(model.layers[0].state_dict())
    rows, positions = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(0)), torch.arange(6) + 9
    causal = torch.full((6, 6), float("-inf")).triu(1)[None, None]
    angles = Qwen3RotaryEmbedding(reference_config)(rows, positions[None])
    with torch.no_grad():
        expected = model.norm(layer(rows, attention_mask=causal, position_embeddings=angles)[0])
        nothing = list(model.context_keys_values(torch.empty(0, 32), torch.empty(0, dtype=torch.int64)))
        zeros, last = np.zeros(6, dtype=np.int64), np.arange(6)
        attend = DenseAttention(KeyRuns(zeros, zeros, zeros, last + 1), 0, 6, torch.device("cpu"))
        embeddings = torch.cat([rows[0], torch.zeros(1, 32)])  # blocks of one row, none of which is a mask
        found = model(embeddings, positions, nothing, [attend])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", LAYERS)
def test_the_wanted_rows_equal_those_of_all_in_value_and_gradient(kind: str) -> None:
    batch, config = make_batch([9, 12, 5]), make_config(LAYERS[kind], anchors_per_batch=32)
    blocks, wanted = next(all_blocks(batch, config)), np.array([1, 2, 3, 5, 40, 41, 0, 0])
    outputs, gradients = [], []
    for rows in (None, wanted):
        model = wide_model(LAYERS[kind])
        hidden = block_hidden(model, frozen_weights()[0], batch, blocks, config, rows)
        chosen = hidden[torch.from_numpy(wanted)] if rows is None else hidden
        chosen[:6].square().sum().backward()  # type: ignore[no-untyped-call]
        outputs.append(chosen.detach())
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=1e-5)
    for few, all_of_them in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(few, all_of_them, rtol=1e-4, atol=1e-4)
