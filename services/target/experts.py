"""The experts of Llama 4 by grouped matrix products: transformers runs every expert for every token.

All other families with experts run `grouped_mm` by transformers' own choice. T tokens, E experts, K chosen ones, H hidden size.
"""

import functools
import logging
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.integrations.moe import _grouped_mm

log = logging.getLogger(__name__)

_WHOLE, _LOOPS = "Llama4TextMoe", "JetMoeMoE"  # classes of transformers


def group_experts(decoder: PreTrainedModel) -> None:
    """Let the layers of Llama 4 in `decoder`, if any, run only the experts that a token has chosen."""
    for module in decoder.modules():
        if type(module).__name__ == _WHOLE:
            module.forward = functools.partial(run_chosen, module)
    if any(type(module).__name__ == _LOOPS for module in decoder.modules()):
        log.warning("%s: transformers runs its experts one after the other and waits for the device", decoder.config.model_type)


def run_chosen(layer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Map [B, S, H] to the sum [T, H] of the shared expert and the chosen ones, and the logits of the router."""
    tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
    scores, logits = layer.router(tokens)  # [T, E], 0 for those not chosen
    weights, chosen = scores.topk(layer.top_k, dim=1)
    chosen, order = chosen.flatten().sort(stable=True)
    rows = order // layer.top_k
    experts = layer.experts
    numbers = torch.arange(experts.num_experts, device=chosen.device)
    ends = torch.searchsorted(chosen, numbers, right=True).to(torch.int32)
    inputs = tokens[rows] * weights.flatten()[order, None]
    gate, up = _grouped_mm(inputs, experts.gate_up_proj, offs=ends).chunk(2, dim=-1)
    outputs = _grouped_mm(up * experts.act_fn(gate), experts.down_proj, offs=ends)
    return layer.shared_expert(tokens).index_add(0, rows, outputs), logits
