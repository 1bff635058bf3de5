"""Settle choices among logits or scores that are nearer than rounding: either is right, so what was needed is taken as found.

S slots of a block, K candidates of a slot, V vocabulary.
"""

import torch
from torch import Tensor

from launch.parity.stages import Reading, Trace, find

ROUNDING = 2.0**-14  # of a row's largest magnitude; float32 rounds at 2^-24 and a forward adds up to 8 % of this bound


def without_ties(needed: Trace, found: Trace) -> list[Reading]:
    """Return the drafts found, but the needed ones where their logits are nearer than their bounds: either is right."""
    settled = []
    for reading in found.get("accepted tokens", []):
        drafts, logits = find(needed, "accepted tokens", reading.where), find(needed, "logits", reading.where)
        if drafts is not None and logits is not None and drafts.shape == reading.values.shape:
            gap = logits.gather(1, drafts.T) - logits.gather(1, reading.values.T)
            tied = gap <= 2 * ROUNDING * logits.abs().amax(1, keepdim=True)
            reading = reading._replace(values=torch.where(tied.T, drafts, reading.values))
        settled.append(reading)
    return settled


def without_tied_choices(needed: Trace, found: Trace) -> Trace:
    """Return what was found, but what was needed from a block's first tied slot on: the walk may part there.

    A slot is tied where other candidates, or another one of the same candidates, were taken with a number that is as large.
    """
    settled: dict[str, list[Reading]] = {stage: [] for stage in ("candidates", "selection", "accepted tokens")}
    for stage, readings in settled.items():
        for reading in found[stage]:
            where = reading.where.removeprefix("tokens, ").removeprefix("logits, ")
            where = where.removeprefix("scores, ").removeprefix("predecessors, ")
            other, tied = find(needed, stage, reading.where), _tied_slots(needed, found, where)
            if other is not None and tied is not None and other.shape == reading.values.shape:
                by_slot = tied if len(reading.values) == 1 else tied[:, None]
                reading = reading._replace(values=torch.where(by_slot, other, reading.values))
            readings.append(reading)
    return {**found, **settled}


def _tied_slots(needed: Trace, found: Trace, where: str) -> Tensor | None:
    """Mark the slots of a block from the first tied one on: bool [S]; None where the two cannot be compared."""
    names = {"logits": where, "candidates": f"tokens, {where}", "selection": f"scores, {where}", "accepted tokens": where}
    ours, theirs = ([find(trace, *name) for name in names.items()] for trace in (needed, found))
    if any(a is None or b is None or a.shape != b.shape for a, b in zip(ours, theirs, strict=True)):
        return None
    logits, tokens, scores, drafts = (value for value in ours if value is not None)
    _, other_tokens, _, other_drafts = (value for value in theirs if value is not None)
    others = (tokens != other_tokens).any(1)
    gap = logits.gather(1, tokens).amin(1) - logits.gather(1, other_tokens).amin(1)
    tied = others & (gap.abs() <= 2 * ROUNDING * logits.abs().amax(1))
    chosen = scores.amax(1) - torch.where(tokens == other_drafts.T, scores, -torch.inf).amax(1)
    tied |= (drafts != other_drafts)[0] & (chosen.abs() <= 2 * ROUNDING * scores.abs().amax(1))
    return tied.cumsum(0) > 0
