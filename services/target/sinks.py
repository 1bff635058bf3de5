"""Attention with sinks by the kernels of SDPA: the numbers of transformers' eager code, without its matrix of scores.

A sink is a logit of a head that takes a share of the softmax and has no value. It becomes a key in front of all others: each
query has one more coordinate, sink / scaling, which is 1 in that key and 0 in all others; its value is 0. A query in front
of all others keeps a causal kernel causal, and its output is dropped.

B rows, N heads, S padded length, D head size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from services.target.architecture import layer_kinds

_NAME = "attention_with_sinks"
_COORDINATES = 8  # kernels need head sizes that are multiples of 8
_KINDS = {"full_attention", "sliding_attention"}  # others mask compressed or chosen keys, which only eager code does


def use_sinks(decoder: PreTrainedModel) -> None:
    """Let a decoder whose attention has sinks run on SDPA, and leave any other as it is."""
    has_sinks = any(name.endswith(".sinks") for name, _ in decoder.named_parameters())
    if has_sinks and set(layer_kinds(decoder.config)) <= _KINDS:
        AttentionInterface.register(_NAME, attend)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        decoder.set_attn_implementation(_NAME)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    s_aux: torch.Tensor | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Map queries [B, N, S, D], and keys and values of fewer heads, to [B, S, N, D] of the values; `s_aux` are sinks [N]."""
    if s_aux is not None:
        size, size_of_values = query.shape[-1], value.shape[-1]
        scaling = size**-0.5 if scaling is None else scaling
        query, key = (F.pad(heads, (0, _COORDINATES, 1, 0)) for heads in (query, key))
        value = F.pad(value, (0, max(size + _COORDINATES - size_of_values, 0), 1, 0))
        query[..., size] = (s_aux / scaling)[:, None]
        key[:, :, 0, size] = 1
        if attention_mask is not None:
            attention_mask = F.pad(attention_mask, (1, 0, 1, 0), value=True)
    output, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **settings)
    return (output, None) if s_aux is None else (output[:, 1:, :, :size_of_values], None)
