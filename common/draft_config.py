"""The settings of the draft model."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from common.target_shape import TargetShape, default_tap_layers
from common.typed_toml import Count, DType, Natural, Section, need

LayerType = Literal["full_attention", "sliding_attention"]
_AS_TARGET = ("num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")  # where 0


class DraftConfig(Section, frozen=True, kw_only=True):
    """The draft model. 0 and [] are completed from the target's config.json, as the description says."""

    kind: Literal["dflash", "dflash2"] = "dflash"  # dflash2 adds convolutions within a block and a selector of candidates
    num_layers: Count = 5  # decoder layers of the draft model
    block_size: Annotated[int, Meta(ge=2)] = 16  # tokens of a block: the anchor and the drafted ones
    mask_token_id: Natural  # a vocabulary id that text never contains, never bos, eos or pad
    tap_layers: list[Natural] = []  # zero-based decoder layers of the target, ascending; [] means evenly spread ones
    layer_types: list[LayerType] = []  # one per layer; [] means full attention everywhere
    sliding_window: Natural = 0  # tokens that a sliding_attention layer sees
    is_causal: bool | None = None  # a row sees no later row of its block; left out: true in sliding layers only, dflash2: false
    conv_group_size: Count = 16  # of dflash2: channels that share the dynamic part of a convolution's weight
    selector_rank: Count = 256  # of dflash2: width of the selector's codebooks
    selector_top_k: Annotated[int, Meta(ge=2)] = 16  # of dflash2: candidates of a slot
    num_attention_heads: Natural = 0  # 0 means as the target
    num_key_value_heads: Natural = 0  # 0 means as the target
    head_dim: Natural = 0  # 0 means as the target
    intermediate_size: Natural = 0  # 0 means as the target
    dtype: DType = "bfloat16"  # of the weights in the step; the master weights are float32
    init: str = ""  # a drafter folder of any known layout to begin from; "" means random weights
    init_fingerprint: str = ""  # of the files in it: filled in by start_all, never by a person

    @property
    def num_candidates(self) -> int:
        """Tokens that a slot chooses from: its prediction alone, unless there is a selector."""
        return self.selector_top_k if self.kind == "dflash2" else 1


def complete_draft(draft: DraftConfig, shape: TargetShape) -> DraftConfig:
    """Fill in what a person left to the target and to the kind of the draft model."""
    return msgspec.structs.replace(
        draft,
        tap_layers=draft.tap_layers or default_tap_layers(shape.num_hidden_layers, draft.num_layers),
        layer_types=draft.layer_types or ["full_attention"] * draft.num_layers,
        is_causal=False if draft.kind == "dflash2" and draft.is_causal is None else draft.is_causal,
        **{name: getattr(draft, name) or getattr(shape, name) for name in _AS_TARGET},
    )


def check_draft(draft: DraftConfig, shape: TargetShape) -> None:
    """Raise ConfigError for the first combination of settings that does not fit."""
    taps, heads, groups = draft.tap_layers, draft.num_attention_heads, draft.num_key_value_heads
    sliding = "sliding_attention" in draft.layer_types
    known = draft.mask_token_id < shape.vocab_size
    need(known, "draft.mask_token_id", f"an id below the vocabulary size {shape.vocab_size}", draft.mask_token_id)
    ascending = taps == sorted(set(taps)) and taps[-1] < shape.num_hidden_layers
    need(ascending, "draft.tap_layers", f"ascending from 0 to {shape.num_hidden_layers - 1}", taps)
    need(len(draft.layer_types) == draft.num_layers, "draft.layer_types", f"{draft.num_layers} entries", draft.layer_types)
    need(not sliding or draft.sliding_window >= 1, "draft.sliding_window", "at least 1", draft.sliding_window)
    wide = draft.intermediate_size
    need(wide >= 1, "draft.intermediate_size", "at least 1, for config.json of the target names none", wide)
    changed = {"an embedding scale": shape.embedding_scale != 1.0, "a softcap of the logits": shape.logit_softcap != 0.0}
    names = " and ".join(name for name, is_true in changed.items() if is_true)
    needed = f"dflash2 for a target with {names}: engines serve DFlash without it"
    need(draft.kind == "dflash2" or not names, "draft.kind", needed, draft.kind)
    if draft.kind == "dflash2":
        size, most = draft.conv_group_size, shape.vocab_size
        need(shape.hidden_size % size == 0, "draft.conv_group_size", f"a divisor of hidden size {shape.hidden_size}", size)
        need(draft.selector_top_k <= most, "draft.selector_top_k", f"at most the vocabulary {most}", draft.selector_top_k)
    need(heads % groups == 0, "draft.num_attention_heads", f"a multiple of num_key_value_heads {groups}", heads)
