"""Decodings of tiny targets, and drafters that have learnt them by heart.

Shapes: N blocks, B block size, V vocabulary.
"""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from common.config import Config
from launch.decoding.answer import Decoding, Limits
from launch.decoding.cases import Turns
from launch.decoding.speculate import decode, speculate
from launch.decoding.target_cache import TargetCache
from services.drafter.model.acceptance import BatchRounds, evaluate_batch
from services.drafter.model.anchors import Blocks, all_blocks
from services.drafter.model.batch import PackedBatch
from services.drafter.model.model import DraftModel
from services.drafter.model.step import block_loss
from tests.builders.batches import randomise

PROMPTS = [[5], [9, 4], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [40, 41, 40, 41, 40]]
RECURRENT = {
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 0,
    "mlp_only_layers": [0, 1, 2, 3],
}
MAMBA_2 = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "tied": ("llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {}),
    "sliding": ("qwen3", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2}),
    "qwen3_next": ("qwen3_next", RECURRENT),
    "qwen3_5": ("qwen3_5_text", RECURRENT),
    "bamba": ("bamba", MAMBA_2 | {"attn_layer_indices": [1]}),
    "falcon_h1": ("falcon_h1", MAMBA_2 | {"mamba_d_ssm": 64}),
}
DFLASH2 = ("draft.kind=dflash2", "draft.conv_group_size=8", "draft.selector_rank=6", "draft.selector_top_k=8")
KINDS = [pytest.param(*target, id=name) for name, target in TARGETS.items()]


@torch.no_grad()
def taps_of(config: Config, target: Any, document: list[int]) -> Tensor:
    with TargetCache(target, config.draft.tap_layers) as cache:
        return cache.prefill(document)[1]


def greedy(target: Any, prompt: list[int], max_new_tokens: int, stop_tokens: list[int] | None = None) -> Decoding:
    return decode(target, prompt, Limits(max_new_tokens, stop_tokens or []))


def drafted(
    target: Any, draft: DraftModel, config: Config, prompt: list[int], max_new_tokens: int, stop_tokens: list[int] | None = None
) -> Decoding:
    return speculate(target, draft, config.draft, prompt, Limits(max_new_tokens, stop_tokens or []))


def pack(config: Config, target: Any, prompts: list[list[int]], answers: list[list[int]]) -> PackedBatch:
    """Documents of prompt and answer, the answers supervised, with the target's own features."""
    documents = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    lengths = [len(document) for document in documents]
    mask = [[False] * len(prompt) + [True] * len(answer) for prompt, answer in zip(prompts, answers, strict=True)]
    return PackedBatch(
        hidden_states=torch.cat([taps_of(config, target, document) for document in documents]),
        position_ids=torch.cat([torch.arange(length) for length in lengths]),
        input_ids=np.concatenate(documents),
        loss_mask=np.concatenate(mask),
        cu_seqlens=np.cumsum([0, *lengths]),
        sample_ids=np.arange(len(lengths)),
    )


def blocks_of(batch: PackedBatch, config: Config) -> Blocks:
    (blocks,) = all_blocks(batch, config)
    return blocks


def begin(config: Config) -> DraftModel:
    """A draft model before training; in that of DFlash 2 convolutions and selector already do something."""
    draft = DraftModel(config)
    return randomise(draft) if draft.is_convolved else draft


def overfit(config: Config, target: Any, batch: PackedBatch, num_steps: int = 80) -> DraftModel:
    """A draft model that has learnt a batch by heart, every anchor of it."""
    draft, blocks = begin(config), blocks_of(batch, config)
    embedding, head = target.get_input_embeddings().weight.detach(), target.get_output_embeddings().weight.detach()
    optimizer = torch.optim.Adam(draft.parameters(), lr=3e-3)
    for _ in range(num_steps):
        sums = block_loss(draft, embedding, head, batch, blocks, config)
        optimizer.zero_grad()
        (sums.loss / sums.weight).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return draft


def measure(config: Config, target: Any, draft: DraftModel, batch: PackedBatch) -> BatchRounds:
    """The rounds of a batch, counted without decoding."""
    return evaluate_batch(draft, target.get_input_embeddings().weight, target.get_output_embeddings().weight, batch, config)


def once(prompt: list[int]) -> Turns:
    """A conversation of one turn."""
    yield prompt
