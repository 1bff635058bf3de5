"""Causal attention without a mask tensor, by transformers' own function and its fast kernels."""

import logging

from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

_NAME = "causal_sdpa"
_MASKLESS = {"full_attention", "linear_attention"}

log = logging.getLogger(__name__)


def leave_out_masks(decoder: PreTrainedModel) -> None:
    """Keep transformers from making masks, which right-padded rows do not need.

    Under the name `sdpa` it looks for packed rows in the position ids and waits for the device to answer, in every forward.
    An attention function without a mask function of its name gets no mask, and SDPA without a mask is causal. A decoder with
    sliding or chunked attention needs its masks: it keeps them, and that wait.
    """
    config: PretrainedConfig = decoder.config
    if set(layer_kinds(config)) <= _MASKLESS:
        AttentionInterface.register(_NAME, sdpa_attention_forward)
        decoder.set_attn_implementation(_NAME)
    else:
        log.info("%s attends within windows: its masks are made anew in every forward", config.model_type)


def layer_kinds(config: PretrainedConfig) -> list[str]:
    """Return the kind of each layer in transformers' names; older configurations have one kind for all."""
    kinds: list[str] | None = getattr(config, "layer_types", None)
    if kinds:
        return kinds
    one = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    return [one] * int(config.num_hidden_layers)
