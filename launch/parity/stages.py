"""The stages of a drafter's forward as both sides computed them, and the first in which they differ.

A side is anything that executes a drafter: it gives a `Trace`. Numbers are float32 on both sides, computed from the
same bfloat16 weights, so what differs beyond the rounding of float32 is a fault and not a precision.

R rows, C channels of a reading.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

STAGES = (
    "tokens",
    "loss mask",
    "taps",
    "projection",
    "rotary angles",
    "keys and values",
    "masks",
    "embeddings",
    "hidden states",
    "logits",
    "accepted tokens",
)
EXACT_STAGES = ("tokens", "loss mask", "masks", "accepted tokens")  # no numbers that could be rounded
ROUNDING = 2.0**-14  # of a row's largest magnitude; float32 rounds at 2^-24 and a forward adds up: 8 % of this were seen


class Reading(NamedTuple):
    """One tensor of one stage.

    Attributes:
        where: what it is and which layer, block or document it belongs to; the same words on both sides.
        values: [R, C], float32, int64 or bool.
        scale: float32 [R], what the bound of a row is relative to; None for the row's largest magnitude.
    """

    where: str
    values: Tensor
    scale: Tensor | None = None


Trace = Mapping[str, list[Reading]]  # by stage; a stage that a side was given, and did not compute, is not there


class Place(NamedTuple):
    """One number on both sides."""

    where: str
    row: int
    channel: int
    needed: float
    found: float
    bound: float


class Verdict(NamedTuple):
    """How one stage compares.

    Attributes:
        stage: its name in STAGES.
        num_values: numbers compared.
        num_differing: those further apart than their bound.
        difference: the largest distance of two numbers.
        bound: the bound of those two.
        place: the worst place of the first reading that differs; None where nothing does.
        note: in words what no number can say: a reading that one side lacks, or of another shape.
    """

    stage: str
    num_values: int
    num_differing: int
    difference: float
    bound: float
    place: Place | None
    note: str

    @property
    def same(self) -> bool:
        """Nothing is further apart than its bound, and nothing is missing."""
        return not self.num_differing and not self.note


def collect(readings: Iterable[tuple[str, Reading]]) -> Trace:
    """Readings under their stages, in the order in which they came."""
    trace: dict[str, list[Reading]] = {}
    for stage, reading in readings:
        trace.setdefault(stage, []).append(reading)
    return trace


def compare(needed: Trace, found: Trace) -> list[Verdict]:
    """One verdict for every stage that both sides computed, in the order of the forward."""
    found = {**found, "accepted tokens": _without_ties(needed, found)}
    return [_compare_stage(stage, needed[stage], found[stage]) for stage in STAGES if stage in needed and stage in found]


def first_difference(verdicts: list[Verdict]) -> Verdict | None:
    """The stage where the fault is; what differs after it follows from it, or is a fault of its own."""
    return next((verdict for verdict in verdicts if not verdict.same), None)


def find(trace: Trace, stage: str, where: str) -> Tensor | None:
    """The values of a reading, where the side has it."""
    return next((reading.values for reading in trace.get(stage, []) if reading.where == where), None)


def _compare_stage(stage: str, needed: list[Reading], found: list[Reading]) -> Verdict:
    others = {reading.where: reading.values for reading in found}
    verdict = Verdict(stage, 0, 0, 0.0, 0.0, None, "")
    for reading in needed:
        other = others.pop(reading.where, None)
        if other is None or other.shape != reading.values.shape:
            shape = "nothing" if other is None else list(other.shape)
            return verdict._replace(note=f"{reading.where}: needed {list(reading.values.shape)}, found {shape}")
        verdict = _add(verdict, reading, other)
    extra = next(iter(others), None)
    return verdict if extra is None else verdict._replace(note=f"{extra}: needed nothing, found it")


def _add(verdict: Verdict, reading: Reading, other: Tensor) -> Verdict:
    distance, bound = distances(reading, other)
    if not distance.numel():
        return verdict
    differing = distance > bound
    excess = distance - bound
    worst = int(excess.argmax()) if bool(differing.any()) else int(distance.argmax())
    row, channel = divmod(worst, distance.shape[1])
    largest = int(distance.argmax())
    place = Place(reading.where, row, channel, *(float(v[row, channel]) for v in (reading.values, other, bound)))
    larger = float(distance.flatten()[largest]) > verdict.difference
    return verdict._replace(
        num_values=verdict.num_values + distance.numel(),
        num_differing=verdict.num_differing + int(differing.sum()),
        difference=float(distance.flatten()[largest]) if larger else verdict.difference,
        bound=float(bound.flatten()[largest]) if larger or not verdict.num_values else verdict.bound,
        place=verdict.place or (place if bool(differing.any()) else None),
    )


def _without_ties(needed: Trace, found: Trace) -> list[Reading]:
    """The drafts found, where two logits are nearer than their bounds with the one that was needed: either is right."""
    settled = []
    for reading in found.get("accepted tokens", []):
        drafts, logits = find(needed, "accepted tokens", reading.where), find(needed, "logits", reading.where)
        if drafts is not None and logits is not None and drafts.shape == reading.values.shape:
            gap = logits.gather(1, drafts.T) - logits.gather(1, reading.values.T)
            tied = gap <= 2 * ROUNDING * logits.abs().amax(1, keepdim=True)
            reading = reading._replace(values=torch.where(tied.T, drafts, reading.values))
        settled.append(reading)
    return settled


def distances(reading: Reading, other: Tensor) -> tuple[Tensor, Tensor]:
    """The distance of every pair of numbers and its bound, [R, C]; NaN is infinitely far from everything."""
    needed, found = reading.values.double(), other.double()
    distance = (needed - found).abs()
    distance = torch.where(needed == found, 0.0, distance).nan_to_num(nan=torch.inf, posinf=torch.inf)
    if not reading.values.is_floating_point():
        return distance, torch.zeros_like(distance)
    scale = needed.abs().amax(1).nan_to_num() if reading.scale is None else reading.scale.double()
    return distance, (ROUNDING * scale)[:, None].expand_as(distance)
