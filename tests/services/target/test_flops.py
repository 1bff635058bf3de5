"""Floating-point operations of a forward, against numbers counted by hand."""

from typing import Any

import numpy as np
import pytest
from transformers import (
    BambaConfig,
    BambaModel,
    FalconH1Config,
    FalconH1Model,
    GraniteMoeHybridConfig,
    GraniteMoeHybridModel,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    Qwen3_5TextConfig,
    Qwen3_5TextModel,
    Qwen3MoeConfig,
    Qwen3MoeModel,
)

from services.target.flops import ForwardFlops, peak_flops_per_s

SHAPE: dict[str, Any] = {"vocab_size": 10, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 4, "head_dim": 4}
LENGTHS = np.array([5, 2])
NUM_TOKENS, NUM_PAIRS = 7, 15 + 3
MLP = 3 * 8 * 16
PER_PAIR = 2 * 2 * 4 * 4  # query with key and weight with value, four heads of four


@pytest.mark.parametrize("num_key_value_heads", [4, 2])
def test_dense_and_grouped_attention(num_key_value_heads: int) -> None:
    decoder = LlamaModel(LlamaConfig(**SHAPE, num_key_value_heads=num_key_value_heads, num_hidden_layers=3))
    projections = 8 * 16 + 2 * 8 * 4 * num_key_value_heads + 16 * 8
    layer = NUM_TOKENS * 2 * (projections + MLP) + NUM_PAIRS * PER_PAIR
    assert ForwardFlops(decoder).of(LENGTHS) == 3 * layer


def test_attention_within_a_window() -> None:
    config = MistralConfig(**SHAPE, num_key_value_heads=4, num_hidden_layers=1, sliding_window=3)
    windowed, full = ForwardFlops(MistralModel(config)), ForwardFlops(LlamaModel(LlamaConfig(**SHAPE, num_hidden_layers=1)))
    unseen = 1 + 2  # by the fourth and the fifth token of the first document
    assert full.of(LENGTHS) - windowed.of(LENGTHS) == unseen * PER_PAIR


def test_a_hybrid_with_a_gated_delta_rule() -> None:
    linear: dict[str, Any] = {"linear_num_key_heads": 2, "linear_key_head_dim": 4, "linear_num_value_heads": 4}
    linear |= {"linear_value_head_dim": 3, "linear_conv_kernel_dim": 4}
    kinds = ["linear_attention", "full_attention"]
    config = Qwen3_5TextConfig(**SHAPE, **linear, num_key_value_heads=2, num_hidden_layers=2, layer_types=kinds)
    key, value = 8, 12
    in_projections, out_projection = 8 * (2 * key + value + value + 4 + 4), value * 8
    convolution, rule = 4 * (2 * key + value), 3 * 4 * 4 * 3  # weights; multiplications of a token
    gated_attention = 8 * 2 * 16 + 2 * 8 * 8 + 16 * 8
    per_token = 2 * (in_projections + out_projection + convolution + rule + MLP + gated_attention + MLP)
    assert ForwardFlops(Qwen3_5TextModel(config)).of(LENGTHS) == NUM_TOKENS * per_token + NUM_PAIRS * PER_PAIR


MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 4, "mamba_d_state": 3, "mamba_n_groups": 1, "mamba_expand": 2}
IN_PROJECTION, OUT_PROJECTION, CONVOLUTION = 8 * (2 * 16 + 2 * 3 + 4), 16 * 8, 4 * (16 + 2 * 3)
MAMBA_PER_TOKEN = 2 * (IN_PROJECTION + OUT_PROJECTION + CONVOLUTION) + 2 * 2 * 4 * 4 * 3  # the update and the reading


def test_bamba_has_a_mamba_or_attention() -> None:
    shape = SHAPE | {"num_attention_heads": 2}
    del shape["head_dim"]
    config = BambaConfig(**shape, **MAMBA, num_key_value_heads=2, num_hidden_layers=2, attn_layer_indices=[1])
    attention = 4 * 8 * 8
    per_token = MAMBA_PER_TOKEN + 2 * (attention + 2 * MLP)
    assert ForwardFlops(BambaModel(config)).of(LENGTHS) == NUM_TOKENS * per_token + NUM_PAIRS * 2 * 2 * 2 * 4


def test_falcon_h1_has_both_in_each_layer() -> None:
    config = FalconH1Config(**SHAPE, **MAMBA, mamba_d_ssm=16, num_key_value_heads=4, num_hidden_layers=2)
    per_token = MAMBA_PER_TOKEN + 2 * (4 * 8 * 16 + MLP)
    assert ForwardFlops(FalconH1Model(config)).of(LENGTHS) == 2 * (NUM_TOKENS * per_token + NUM_PAIRS * PER_PAIR)


def test_granite_has_experts_beside_a_mamba() -> None:
    shape = SHAPE | {"num_attention_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 6}
    del shape["head_dim"]
    config = GraniteMoeHybridConfig(**shape, **MAMBA, num_hidden_layers=1, layer_types=["linear_attention"])
    experts, shared = 2 * 3 * 8 * 16, 3 * 8 * 6
    per_token = MAMBA_PER_TOKEN + 2 * (experts + shared)
    assert ForwardFlops(GraniteMoeHybridModel(config)).of(LENGTHS) == NUM_TOKENS * per_token


def test_experts_count_as_far_as_a_token_uses_them() -> None:
    experts: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5}
    config = Qwen3MoeConfig(**SHAPE, **experts, num_key_value_heads=4, num_hidden_layers=1)
    per_token = 2 * (4 * 8 * 16 + 2 * 3 * 8 * 5)
    assert ForwardFlops(Qwen3MoeModel(config)).of(LENGTHS) == NUM_TOKENS * per_token + NUM_PAIRS * PER_PAIR


def test_peaks_are_found_by_the_name_of_the_device() -> None:
    assert peak_flops_per_s("NVIDIA H200") == 989e12
    assert peak_flops_per_s("") is None
