"""A tiny configuration and made-up packed batches for the tests of the draft model."""

from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from common.acceptance import Evaluation
from common.config import ActorsConfig, Config, DataConfig, ModelConfig, PlanConfig, TargetsConfig, TrainConfig
from common.draft_config import DraftConfig
from common.target_shape import TargetShape
from services.drafter.model.batch import PackedBatch
from services.drafter.model.model import DraftModel
from services.drafter.model.visibility import BlockAnchors

VOCAB_SIZE, HIDDEN_SIZE, NUM_TAPS, BLOCK_SIZE, MASK_TOKEN = 32, 32, 2, 4, 31


def make_shape(head_dim: int) -> TargetShape:
    return TargetShape(
        model_type="qwen3",
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )


def make_config(
    layer_types: list[Any] | None = None, sliding_window: int = 5, dtype: Any = "float32", head_dim: int = 8, **train: Any
) -> Config:
    """Two taps of a target with 4 heads; one draft layer per entry of `layer_types`."""
    layer_types = layer_types or ["sliding_attention", "full_attention"]
    draft = DraftConfig(
        num_layers=len(layer_types),
        block_size=BLOCK_SIZE,
        mask_token_id=MASK_TOKEN,
        tap_layers=[1, 5],
        layer_types=layer_types,
        sliding_window=sliding_window,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        intermediate_size=48,
        dtype=dtype,
    )
    return Config(
        seed=3,
        model=ModelConfig(path=""),
        draft=draft,
        data=DataConfig(),
        plan=PlanConfig(bucket_lengths=[64], max_tokens_per_batch=256, batches_per_step=1),
        targets=TargetsConfig(devices=["cpu"]),
        drafters=ActorsConfig(devices=["cpu"]),
        train=TrainConfig(**{"anchors_per_batch": 16, **train}),
        target_shape=make_shape(head_dim),
    )


def make_batch(lengths: list[int], prompt: int = 2, seed: int = 0, device: str = "cpu") -> PackedBatch:
    """Random documents whose first `prompt` tokens are not supervised."""
    random = np.random.default_rng(seed)
    position_ids = np.concatenate([np.arange(length) for length in lengths])
    features = random.standard_normal((sum(lengths), NUM_TAPS, HIDDEN_SIZE), dtype=np.float32)
    return PackedBatch(
        hidden_states=torch.from_numpy(features).to(device),
        position_ids=torch.from_numpy(position_ids).to(device),
        input_ids=random.integers(0, MASK_TOKEN, sum(lengths)),
        loss_mask=position_ids >= prompt,
        cu_seqlens=np.cumsum([0, *lengths]),
        sample_ids=np.arange(len(lengths)) + 100,
    )


def make_evaluation(step: int, acceptance: float) -> Evaluation:
    """A measurement of ten rounds."""
    return Evaluation(
        step=step,
        acceptance=acceptance,
        acceptance_per_position=[acceptance - 1, 0.0, 0.0],
        num_rounds=10,
        num_tokens=round(10 * acceptance),
        acceptance_other_prompt=1.0,
        sets={},
    )


def frozen_weights(seed: int = 0, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Embedding and head, both [V, H]."""
    generator = torch.Generator().manual_seed(seed)
    embed, head = torch.randn(2, VOCAB_SIZE, HIDDEN_SIZE, generator=generator).to(device).unbind()
    return embed, head


def document_alone(batch: PackedBatch, document: int) -> PackedBatch:
    """One document of a batch as a batch of its own."""
    rows = slice(int(batch.cu_seqlens[document]), int(batch.cu_seqlens[document + 1]))
    return PackedBatch(
        hidden_states=batch.hidden_states[rows],
        position_ids=batch.position_ids[rows],
        input_ids=batch.input_ids[rows],
        loss_mask=batch.loss_mask[rows],
        cu_seqlens=np.array([0, rows.stop - rows.start]),
        sample_ids=batch.sample_ids[document : document + 1],
    )


def random_anchors(lengths: list[int], num_blocks: int) -> BlockAnchors:
    """Return sorted anchors over documents of these lengths; the last two blocks are padding."""
    starts = np.cumsum([0, *lengths])
    anchors = np.sort(np.random.default_rng(0).choice(starts[-1], num_blocks, replace=False))
    valid = np.arange(num_blocks) < num_blocks - 2
    return BlockAnchors(np.where(valid, anchors, 0), starts[np.searchsorted(starts, anchors, side="right") - 1] * valid, valid)


def dflash2(config: Config, **draft: Any) -> Config:
    """Return the configuration with a small DFlash 2 as its draft model."""
    keys = {"kind": "dflash2", "is_causal": False, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 4, **draft}
    return msgspec.structs.replace(config, draft=msgspec.structs.replace(config.draft, **keys))


def randomise(model: DraftModel, scale: float = 0.3) -> DraftModel:
    """Add random values to all weights, so that convolutions and selector do something."""
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=random), alpha=scale)
    return model
