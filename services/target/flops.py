"""Floating-point operations of a target's forward: those of the matrix products that the real tokens need.

A multiplication and an addition are two. T tokens of a document.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn
from transformers import PreTrainedModel

from services.target.architecture import find_layers, layer_kinds

PEAK_FLOPS_PER_S = {"A100": 312e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12}  # bfloat16, dense, NVIDIA's data sheets
_RECURRENT = ("linear_attention", "mamba", "hybrid")  # a "hybrid" layer of Falcon-H1 has both
_ATTENDING = ("attention", "full_attention", "sliding_attention", "chunked_attention", "hybrid")
_EXPERTS = ("experts.gate_up_proj", "experts.down_proj")  # [experts, out, in]; their router is not counted
_CHOSEN_EXPERTS = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token", "moe_top_k")
_MAMBA = (("mamba_n_heads", "mamba_num_heads"), ("mamba_d_head", "mamba_head_dim"), ("mamba_d_state", "ssm_state_size"))


class ForwardFlops:
    """Counts once what a token costs in the layers of a decoder; the embedding is no product, the head is not run."""

    def __init__(self, decoder: PreTrainedModel) -> None:
        config: Any = decoder.config
        layers = find_layers(decoder).layers
        kinds = layer_kinds(config)[: len(layers)]
        num_weights = sum(module.weight.numel() for module in layers.modules() if isinstance(module, (nn.Linear, nn.Conv1d)))
        experts = [weight[0].numel() for name, weight in layers.named_parameters() if name.endswith(_EXPERTS)]
        num_weights += sum(experts) * _first_of(config, _CHOSEN_EXPERTS) if experts else 0
        num_recurrent = sum(kind in _RECURRENT for kind in kinds)
        self._per_token: float = 2.0 * num_weights + num_recurrent * _recurrence(config)
        head_dim = _first_of(config, ("head_dim",)) or config.hidden_size // config.num_attention_heads
        self._per_pair: float = 4.0 * config.num_attention_heads * head_dim  # query with key, weight with value
        window = getattr(config, "sliding_window", None) or 0
        self._windows = [window if kind == "sliding_attention" else 0 for kind in kinds if kind in _ATTENDING]

    def of(self, lengths: NDArray[np.integer]) -> float:
        """Count a batch of documents of these lengths; padding costs time but is not counted."""
        tokens = lengths.astype(np.float64)
        pairs = sum(_num_causal_pairs(tokens, window) for window in self._windows)
        return self._per_token * float(tokens.sum()) + self._per_pair * pairs


def peak_flops_per_s(device_name: str) -> float | None:
    """Return the peak of a GPU of this name, or None if it is not known."""
    return next((peak for name, peak in PEAK_FLOPS_PER_S.items() if name in device_name), None)


def _recurrence(config: Any) -> float:
    """Count a token in the recurrence of one layer; 0 for an unknown kind, of which only the matrix products are counted.

    A gated delta rule (arXiv 2412.06464) takes S k, the update of S by an outer product, and S q; Mamba 2 (arXiv 2405.21060)
    the update and the reading.
    """
    if heads := getattr(config, "linear_num_value_heads", None):
        return 6.0 * float(heads * config.linear_key_head_dim * config.linear_value_head_dim)
    heads, head_dim, state = (_first_of(config, names) for names in _MAMBA)
    return 4.0 * heads * head_dim * state


def _first_of(config: Any, names: Sequence[str]) -> int:
    """Return a number under the first of the names that a family gives it; 0 where it has none."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int)), 0)


def _num_causal_pairs(tokens: NDArray[np.float64], window: int) -> float:
    """Count T (T + 1) / 2 pairs per document, less those outside the window."""
    beyond = np.maximum(tokens - window, 0.0) if window else np.zeros_like(tokens)
    return float((tokens * (tokens + 1) - beyond * (beyond + 1)).sum()) / 2
