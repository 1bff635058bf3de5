"""Compare two traces, and name the first stage in which they differ.

Numbers are float32 on both sides, computed from the same bfloat16 weights, so a difference beyond the rounding of float32
is a fault. R rows, C channels of a reading.
"""

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from launch.parity.stages import STAGES, Reading, Trace, forward_order
from launch.parity.ties import ROUNDING, without_tied_choices, without_ties


class Deviation(msgspec.Struct, frozen=True):
    """One number on both sides."""

    where: str
    row: int
    channel: int
    needed: float
    found: float
    bound: float


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one stage."""

    stage: str
    same: bool
    num_values: int = 0
    num_differing: int = 0  # further apart than their bound
    difference: float = 0.0  # the largest distance of two numbers
    bound: float = 0.0  # of the two
    worst: Deviation | None = None  # of the first reading that differs
    note: str = ""  # on a reading that is missing or of another shape; then no numbers are compared


def compare_traces(needed: Trace, found: Trace) -> list[Verdict]:
    """Return a verdict for every stage that both sides computed, in the order of the forward."""
    if "selection" in needed and "selection" in found:
        found = without_tied_choices(needed, found)
    else:
        found = {**found, "accepted tokens": without_ties(needed, found)}
    return [_compare_stage(stage, needed[stage], found[stage]) for stage in STAGES if stage in needed and stage in found]


def first_difference(verdicts: list[Verdict]) -> Verdict | None:
    """Return the stage of the fault; later differences follow from it, or are faults of their own."""
    differing = [verdict for verdict in verdicts if not verdict.same]
    return min(differing, key=_order, default=None)


def _order(verdict: Verdict) -> tuple[int, int, int]:
    where = verdict.worst.where if verdict.worst else verdict.note  # which begins with the reading
    return forward_order(verdict.stage, where)


def _compare_stage(stage: str, needed: list[Reading], found: list[Reading]) -> Verdict:
    others = {reading.where: reading.values for reading in found}
    if note := _find_mismatch(needed, others):
        return Verdict(stage=stage, same=False, note=note)
    compared = [(reading, *_distances(reading, others[reading.where])) for reading in needed if reading.values.numel()]
    if not compared:
        return Verdict(stage=stage, same=True)
    counts = [int((distance > bound).sum()) for _, distance, bound in compared]
    _, distance, bound = max(compared, key=lambda each: float(each[1].max()))
    largest = int(distance.argmax())
    first = next((each for each, count in zip(compared, counts, strict=True) if count), None)
    return Verdict(
        stage=stage,
        same=first is None,
        num_values=sum(distance.numel() for _, distance, _ in compared),
        num_differing=sum(counts),
        difference=float(distance.flatten()[largest]),
        bound=float(bound.flatten()[largest]),
        worst=_find_worst(*first, others) if first else None,
    )


def _find_mismatch(needed: list[Reading], others: Mapping[str, Tensor]) -> str:
    for reading in needed:
        other = others.get(reading.where)
        if other is None or other.shape != reading.values.shape:
            shape = "nothing" if other is None else list(other.shape)
            return f"{reading.where}: needed {list(reading.values.shape)}, found {shape}"
    extra = next(iter(others.keys() - {reading.where for reading in needed}), None)
    return f"{extra}: needed nothing, found it" if extra else ""


def _find_worst(reading: Reading, distance: Tensor, bound: Tensor, others: Mapping[str, Tensor]) -> Deviation:
    row, channel = divmod(int((distance - bound).argmax()), distance.shape[1])
    numbers = (float(values[row, channel]) for values in (reading.values, others[reading.where], bound))
    return Deviation(reading.where, row, channel, *numbers)


def _distances(reading: Reading, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distance of every pair of numbers and its bound, [R, C]; NaN is infinitely far from everything."""
    needed, found = reading.values.double(), other.double()
    distance = torch.where(needed == found, 0.0, (needed - found).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf)
    if not reading.values.is_floating_point():
        return distance, torch.zeros_like(distance)
    scale = needed.abs().amax(1).nan_to_num() if reading.scale is None else reading.scale.double()
    return distance, (ROUNDING * scale)[:, None].expand_as(distance)
