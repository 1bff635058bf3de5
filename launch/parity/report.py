"""A comparison as a table for people and as JSON for programs."""

from typing import Any, NamedTuple

from launch.parity.causes import likely_cause
from launch.parity.sides import Outcome
from launch.parity.stages import EXACT_STAGES, ROUNDING, STAGES, Trace, Verdict, compare, find, first_difference

COLUMNS = "{:<16} {:>10} {:>10} {:>20} {:>11}  {}"


class Report(NamedTuple):
    """All that is said of two drafters.

    Attributes:
        needed: the reference, in words.
        found: what was checked, in words.
        verdicts: one for every stage compared.
        first: the stage where the fault is, or None.
        cause: of `first`, in one sentence; empty where nothing differs.
        doubts: what looks wrong and cannot be decided from the files.
        num_blocks: blocks that both drafted.
        acceptance: drafts accepted per block, needed and found, where the text says what is right.
    """

    needed: str
    found: str
    verdicts: list[Verdict]
    first: Verdict | None
    cause: str
    doubts: list[str]
    num_blocks: int
    acceptance: tuple[float, float]

    @property
    def same(self) -> bool:
        """No stage differs."""
        return self.first is None


def make_report(outcome: Outcome) -> Report:
    """Compare two sides."""
    needed, found = outcome.needed, outcome.found
    verdicts = compare(needed.trace, found.trace)
    first = first_difference(verdicts)
    return Report(
        needed=needed.name,
        found=found.name,
        verdicts=verdicts,
        first=first,
        cause=likely_cause(first, needed, found) if first else "",
        doubts=outcome.doubts,
        num_blocks=len(found.trace["accepted tokens"]),
        acceptance=(accepted_per_block(needed.trace, found.trace), accepted_per_block(found.trace, found.trace)),
    )


def accepted_per_block(drafts: Trace, labels: Trace) -> float:
    """Mean length of the prefix of every block's drafts that equals the text."""
    counts = []
    for reading in drafts["accepted tokens"]:
        true = find(labels, "loss mask", f"labels, {reading.where}")
        if true is not None and true.shape == reading.values.shape:
            counts.append(int((reading.values == true).long().cumprod(1).sum()))
    return sum(counts) / max(len(counts), 1)


def format_report(report: Report) -> str:
    """The table, then what differs first and why."""
    lines = [f"needed: {report.needed}", f"found:  {report.found}", ""]
    lines.append(COLUMNS.format("stage", "largest", "its bound", "differing", "of", "verdict"))
    verdicts = {verdict.stage: verdict for verdict in report.verdicts}
    lines += [_line(stage, verdicts.get(stage)) for stage in STAGES]
    lines += ["", f"accepted drafts per block: needed {report.acceptance[0]:.2f}, found {report.acceptance[1]:.2f}"]
    lines[-1] += f" ({report.num_blocks} blocks)"
    if report.first is None:
        lines.append(f"the same: no number is further apart than {ROUNDING:.0e} of its row's largest (float32 on both sides)")
    else:
        lines += ["", f"first difference: {report.first.stage}", *_describe(report.first), f"likely cause: {report.cause}"]
    return "\n".join(lines + [f"doubt: {doubt}" for doubt in report.doubts])


def _line(stage: str, verdict: Verdict | None) -> str:
    if verdict is None:
        return COLUMNS.format(stage, "", "", "", "", "given").rstrip()
    word = "same" if verdict.same else "DIFFERS"
    exact = stage in EXACT_STAGES
    largest, bound = ("", "exact") if exact else (f"{verdict.difference:.1e}", f"{verdict.bound:.1e}")
    return COLUMNS.format(stage, largest, bound, f"{verdict.num_differing:,}", f"{verdict.num_values:,}", word)


def _describe(verdict: Verdict) -> list[str]:
    if verdict.place is None:
        return [f"  {verdict.note}"]
    place = verdict.place
    apart = f"apart {abs(place.needed - place.found):.3g}, bound {place.bound:.3g}"
    return [
        f"  {place.where}, row {place.row}, channel {place.channel}",
        f"  needed {place.needed:.6g}, found {place.found:.6g}, {apart}",
    ]


def to_json(report: Report) -> dict[str, Any]:
    """The same content as plain values."""
    return {
        "same": report.same,
        "needed": report.needed,
        "found": report.found,
        "first_difference": report.first.stage if report.first else None,
        "cause": report.cause or None,
        "doubts": report.doubts,
        "num_blocks": report.num_blocks,
        "accepted_per_block": {"needed": report.acceptance[0], "found": report.acceptance[1]},
        "stages": [_verdict_to_json(verdict) for verdict in report.verdicts],
    }


def _verdict_to_json(verdict: Verdict) -> dict[str, Any]:
    return verdict._asdict() | {"same": verdict.same, "place": verdict.place._asdict() if verdict.place else None}
