"""From the first difference to its likely cause, in one sentence.

The tables below look at the numbers themselves, so that they hold for folders of any origin. D head_dim.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from launch.parity.stages import ROUNDING, Trace, Verdict, find


class Side(NamedTuple):
    """One executed drafter.

    Attributes:
        name: in words.
        trace: what it computed.
        tensors: its weights by the names of z-lab's layout, float32.
        layer_ids: target layers that it taps, zero-based.
    """

    name: str
    trace: Trace
    tensors: Mapping[str, Tensor]
    layer_ids: list[int]


def likely_cause(verdict: Verdict, needed: Side, found: Side) -> str:
    """What most often makes this stage differ when all before it agree."""
    if verdict.note:
        return f"the two are drafters of another shape ({verdict.note})"
    assert verdict.place is not None
    match verdict.stage:
        case "tokens":
            return _tokens(verdict)
        case "loss mask":
            return "the two disagree on which tokens are supervised, so blocks start or end elsewhere"
        case "taps":
            return _taps(needed, found)
        case "rotary angles":
            return _angles(verdict, needed, found)
        case "masks":
            return _masks(verdict, needed, found)
        case "embeddings":
            return "the embedding is not the target's, or is scaled on one side only"
        case "logits":
            return _logits(verdict, needed, found)
        case "accepted tokens":
            return "the logits agree, so one side does not take the largest"
    return _weights(verdict, needed, found)


def _tokens(verdict: Verdict) -> str:
    assert verdict.place is not None
    if verdict.place.channel == 0:
        return "the blocks begin with other tokens: the anchor is not the last known token on one side"
    return (
        f"mask_token_id: masked slots are filled with {verdict.place.found:.0f}, "
        f"the drafter learnt them as {verdict.place.needed:.0f}"
    )


def _taps(needed: Side, found: Side) -> str:
    if needed.layer_ids == found.layer_ids:
        return "the same layers are tapped, so the targets differ: other weights, or another place inside the layer"
    shifts = {b - a for a, b in zip(needed.layer_ids, found.layer_ids, strict=True)}
    text = f"target_layer_ids: layers {found.layer_ids} are tapped, needed {needed.layer_ids}"
    if shifts in ({1}, {-1}):
        text += f", off by {shifts.pop():+d} (z-lab's layout holds zero-based ids, speculators' layout ids + 1)"
    return text


def _angles(verdict: Verdict, needed: Side, found: Side) -> str:
    """Told from the turn per position of every channel, its angle at position 1."""
    assert verdict.place is not None
    if verdict.place.where.endswith("by the older keys"):
        return (
            "the older keys rope_theta and rope_scaling of config.json contradict rope_parameters, "
            "and an engine that reads the older ones turns heads by other angles"
        )
    turns, other = (_turns(side.trace) for side in (needed, found))
    still = int((other == 0).sum())
    if still > int((turns == 0).sum()):
        return f"partial_rotary_factor: {still} of {len(other)} channels of a head are not rotated, where a drafter rotates all"
    theta, other_theta = _theta(turns), _theta(other)
    if theta and other_theta and abs(math.log(other_theta / theta)) > 1e-3:
        return f"rope_theta: the angles differ channel by channel as theta {other_theta:.6g} does from {theta:.6g}"
    return "rope_scaling: another kind of scaling, such as YaRN on one side only"


def _turns(trace: Trace) -> Tensor:
    """[D], radians per position."""
    where = "document 0"
    cosine, sine = (find(trace, "rotary angles", f"{name}, {where}") for name in ("cosine", "sine"))
    assert cosine is not None
    assert sine is not None
    return torch.atan2(sine[1], cosine[1]).double()


def _theta(turns: Tensor) -> float | None:
    """The base of turns theta^(-i / half), or None where they are not of this form."""
    half = len(turns) // 2
    turns = turns[:half]
    if half < 2 or bool((turns <= 0).any()):
        return None
    theta = math.exp(-float(turns[1].log()) * half)
    expected = theta ** (-torch.arange(half) / half).double()
    return theta if bool(((turns / expected).log().abs() < 0.01).all()) else None


def _masks(verdict: Verdict, needed: Side, found: Side) -> str:
    assert verdict.place is not None
    where = verdict.place.where
    wanted, seen = find(needed.trace, "masks", where), find(found.trace, "masks", where)
    assert wanted is not None
    assert seen is not None
    size, long = len(wanted), where.endswith("long document")
    end = wanted.shape[1] - (0 if long else 1)
    if not long and bool((wanted[:, -1] | seen[:, -1]).any()):
        return "one side looks at rows of another document or block"
    inside = slice(end - size, end)
    ahead = [bool(mask[:, inside].triu(1).any()) for mask in (wanted, seen)]
    if ahead[0] != ahead[1]:
        ways = ["both ways", "causally"] if ahead[1] else ["causally", "both ways"]
        return f"is_causal or layer_types: this layer looks {ways[0]} inside a block, the drafter learnt to look {ways[1]}"
    counts = [int(mask[0].sum()) for mask in (wanted, seen)]
    return (
        f"sliding_window, use_sliding_window or layer_types: the first row of a block sees {counts[1]} rows, "
        f"the drafter learnt with {counts[0]}"
    )


def _logits(verdict: Verdict, needed: Side, found: Side) -> str:
    assert verdict.place is not None
    wanted, got = (find(side.trace, "logits", verdict.place.where) for side in (needed, found))
    assert wanted is not None
    assert got is not None
    likeness = float(torch.cosine_similarity(wanted, got, dim=1).mean())
    kind = "is unlike the needed one: random, or of another model" if abs(likeness) < 0.5 else "is another"
    return f"the hidden states agree, so the head differs: it {kind} (cosine of the logits {likeness:.2f})"


def _weights(verdict: Verdict, needed: Side, found: Side) -> str:
    """Which tensors of the stage differ."""
    assert verdict.place is not None
    names = [name for name in needed.tensors if _belongs(name, verdict.stage, verdict.place.where)]
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
    if where.startswith("final norm"):
        return name == "norm.weight"
    layer = where.partition("layer ")[2].partition(",")[0]
    parts = {"keys": ("k_proj", "k_norm"), "values": ("v_proj",)}.get(where.partition(" ")[0], ("",))
    return name.startswith(f"layers.{layer}.") and any(part in name for part in parts)


def _differs(needed: Tensor, found: Tensor | None) -> bool:
    """Beyond rounding, or not a number."""
    if found is None or found.shape != needed.shape:
        return True
    return not bool((found - needed).abs().max() <= ROUNDING * needed.abs().max())


def _is_constant(tensor: Tensor) -> bool:
    return bool((tensor == tensor.flatten()[0]).all())
