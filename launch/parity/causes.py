"""Name the likely cause of the first difference, in one sentence.

Each function reads the numbers themselves, so it holds for folders of any origin. D head_dim.
"""

import math

import torch
from torch import Tensor

from launch.parity import causes_dflash2
from launch.parity.compare import Deviation, Verdict
from launch.parity.stages import OLDER_KEYS, Executed, get
from launch.parity.ties import ROUNDING

_OF_BOTH_KINDS = ("hidden states", "accepted tokens")  # where DFlash and DFlash 2 are first seen to part
_PARTS = {  # a part of a layer, and the tensors that it comes from
    "keys": ("k_proj", "k_norm"),
    "values": ("v_proj",),
    "attention input": ("input_layernorm",),
    "attention coefficients": ("attention_conv",),
    "attention side 0": ("attention_conv",),
    "attention output": ("self_attn",),
    "attention side 1": ("attention_conv",),
    "mlp input": ("post_attention_layernorm",),
    "mlp coefficients": ("mlp_conv",),
    "mlp side 0": ("mlp_conv",),
    "mlp output": ("mlp.",),
    "mlp side 1": ("mlp_conv",),
}


def likely_cause(verdict: Verdict, needed: Executed, found: Executed) -> str:
    """Return the most frequent cause of a difference in this stage while all stages before it agree."""
    worst = verdict.worst
    if ("convolutions" in needed.trace) != ("convolutions" in found.trace) and verdict.stage in _OF_BOTH_KINDS:
        return causes_dflash2.explain_kind(found)
    if worst is None and verdict.stage == "candidates":
        return causes_dflash2.explain_count(needed, found)
    if worst is None:
        return f"the two are drafters of another shape ({verdict.note})"
    match verdict.stage:
        case "tokens":
            return _explain_tokens(worst)
        case "loss mask":
            return "the two disagree on which tokens are supervised, so blocks start or end elsewhere"
        case "taps":
            return _explain_taps(needed, found)
        case "rotary angles":
            return _explain_angles(worst, needed, found)
        case "masks":
            return _explain_masks(worst.where, *_both(worst.where, "masks", needed, found))
        case "embeddings":
            return "the embedding is not the target's, or is scaled on one side only"
        case "logits":
            return _explain_logits(*_both(worst.where, "logits", needed, found))
        case "candidates":
            return "the logits agree, so one side does not take the largest as candidates"
        case "accepted tokens":
            agreeing = "scores" if "selection" in needed.trace else "logits"
            return f"the {agreeing} agree, so one side does not take the largest"
        case "convolutions" if cause := causes_dflash2.explain_convolution(worst.where, needed, found):
            return cause
        case "selection" if cause := causes_dflash2.explain_selection(worst.where, needed, found):
            return cause
    return _explain_weights(verdict.stage, worst.where, needed, found)


def _both(where: str, stage: str, needed: Executed, found: Executed) -> tuple[Tensor, Tensor]:
    """Return the values of a reading that both traces have."""
    return get(needed.trace, stage, where), get(found.trace, stage, where)


def _explain_tokens(worst: Deviation) -> str:
    if worst.channel == 0:
        return "the blocks begin with other tokens: the anchor is not the last known token on one side"
    return f"mask_token_id: masked slots are filled with {worst.found:.0f}, the drafter learnt them as {worst.needed:.0f}"


def _explain_taps(needed: Executed, found: Executed) -> str:
    if needed.tap_layers == found.tap_layers:
        return "the same layers are tapped, so the targets differ: other weights, or other outputs of a layer"
    shifts = {b - a for a, b in zip(needed.tap_layers, found.tap_layers, strict=True)}
    text = f"target_layer_ids: layers {found.tap_layers} are tapped, needed {needed.tap_layers}"
    if shifts in ({1}, {-1}):
        text += f", off by {shifts.pop():+d} (z-lab's layout holds zero-based ids, speculators' layout ids + 1)"
    return text


def _explain_angles(worst: Deviation, needed: Executed, found: Executed) -> str:
    """Read the cause from the rotation per position of every channel, its angle at position 1."""
    if worst.where.endswith(OLDER_KEYS):
        return (
            "the older keys rope_theta and rope_scaling of config.json contradict rope_parameters, "
            "and an engine that reads the older ones turns heads by other angles"
        )
    cosines, sines = (_both(f"{name}, document 0", "rotary angles", needed, found) for name in ("cosine", "sine"))
    turns, other = (torch.atan2(sine[1], cosine[1]).double() for cosine, sine in zip(cosines, sines, strict=True))
    still = int((other == 0).sum())
    if still > int((turns == 0).sum()):
        return f"partial_rotary_factor: {still} of {len(other)} channels of a head are not rotated, where a drafter rotates all"
    theta, other_theta = _find_theta(turns), _find_theta(other)
    if theta and other_theta and abs(math.log(other_theta / theta)) > 1e-3:
        return f"rope_theta: the angles differ channel by channel as theta {other_theta:.6g} does from {theta:.6g}"
    return "rope_scaling: another kind of scaling, such as YaRN on one side only"


def _find_theta(turns: Tensor) -> float | None:
    """Return the base of rotations [D] of the form theta^(-i / half), or None where they have another form."""
    half = len(turns) // 2
    turns = turns[:half]
    if half < 2 or bool((turns <= 0).any()):
        return None
    theta = math.exp(-float(turns[1].log()) * half)
    expected = theta ** (-torch.arange(half) / half).double()
    return theta if bool(((turns / expected).log().abs() < 0.01).all()) else None


def _explain_masks(where: str, needed: Tensor, found: Tensor) -> str:
    size, long = len(needed), where.endswith("long document")  # a long document has no last column for other documents
    end = needed.shape[1] - (0 if long else 1)
    if not long and bool((needed[:, -1] | found[:, -1]).any()):
        return "one side looks at rows of another document or block"
    was_both_ways, is_both_ways = (bool(mask[:, end - size : end].triu(1).any()) for mask in (needed, found))
    if was_both_ways != is_both_ways:
        ways = ("both ways", "causally") if is_both_ways else ("causally", "both ways")
        return f"is_causal or layer_types: this layer looks {ways[0]} inside a block, the drafter learnt to look {ways[1]}"
    return (
        f"sliding_window, use_sliding_window or layer_types: the first row of a block sees {int(found[0].sum())} rows, "
        f"the drafter learnt with {int(needed[0].sum())}"
    )


def _explain_logits(needed: Tensor, found: Tensor) -> str:
    needed_order, order = needed.argsort(1), found.argsort(1)
    if torch.equal(needed_order, order):
        return "the hidden states agree, so logits are scaled or bent on one side: output_multiplier or final_logit_softcapping"
    likeness = float(torch.cosine_similarity(needed, found, dim=1).mean())
    kind = "is unlike the needed one: random, or of another model" if abs(likeness) < 0.5 else "is another"
    return f"the hidden states agree, so the head differs: it {kind} (cosine of the logits {likeness:.2f})"


def _explain_weights(stage: str, where: str, needed: Executed, found: Executed) -> str:
    """Name the tensors of the stage that differ."""
    names = [name for name in needed.tensors if _belongs(name, stage, where)]
    differing = [name for name in names if _differs(needed.tensors[name], found.tensors.get(name))]
    if not differing:
        return "the weights of this stage agree, so the arithmetic differs: rms_norm_eps, hidden_act, or the order of heads"
    constant = [name for name in differing if name in found.tensors and _is_constant(found.tensors[name])]
    if constant:
        value = float(found.tensors[constant[0]].flatten()[0])
        return f"{', '.join(constant)}: {value:g} everywhere in what was found, as if never loaded"
    return f"the weights differ, as those of another step or a damaged file would: {', '.join(differing)}"


def _belongs(name: str, stage: str, where: str) -> bool:
    if stage == "projection":
        return name in ("fc.weight", "hidden_norm.weight")
    if stage == "selection":
        return name.startswith("candidate_selector.")
    if where.startswith("final norm"):
        return name == "norm.weight"
    layer = where.partition("layer ")[2].partition(",")[0]
    part = where.split(", ")[1] if stage in ("convolutions", "hidden states") else where.partition(" ")[0]
    parts = _PARTS.get(part, ("",))
    return name.startswith(f"layers.{layer}.") and any(part in name for part in parts)


def _differs(needed: Tensor, found: Tensor | None) -> bool:
    """Return True for a distance beyond rounding, and for numbers that are none."""
    if found is None or found.shape != needed.shape:
        return True
    return not bool((found - needed).abs().max() <= ROUNDING * needed.abs().max())


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())
