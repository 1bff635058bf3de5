"""Causal attention without a mask tensor, by transformers' own function and its fast kernels."""

import logging

from transformers import AttentionInterface, PreTrainedModel
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
    config = decoder.config
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_window = not getattr(config, "layer_types", None) and getattr(config, "sliding_window", None) is not None
    if kinds <= _MASKLESS and not has_window:
        AttentionInterface.register(_NAME, sdpa_attention_forward)
        decoder.set_attn_implementation(_NAME)
    else:
        log.info("%s attends within windows: its masks are made anew in every forward", config.model_type)
