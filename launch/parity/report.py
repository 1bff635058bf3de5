"""A comparison as JSON for programs and as a table for people."""

import msgspec

from launch.parity.compare import Verdict
from launch.parity.stages import EXACT_STAGES, ONLY_DFLASH2, STAGES, Trace, find
from launch.parity.ties import ROUNDING

COLUMNS = "{:<16} {:>10} {:>10} {:>20} {:>11}  {}"


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """Drafts accepted per block, where the text says which tokens are right."""

    needed: float
    found: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the JSON."""

    same: bool
    needed: str  # the reference, in words
    found: str  # the subject, in words
    first_difference: str | None  # the stage of the fault
    cause: str | None
    warnings: list[str]  # of what seems wrong with the subject and cannot be decided by executing it
    num_blocks: int
    accepted_per_block: Accepted
    stages: list[Verdict]  # in the order of the forward


def count_accepted(drafts: Trace, labels: Trace) -> float:
    """Return the mean length of the prefix of every block's drafts that equals the text."""
    counts = []
    for reading in drafts["accepted tokens"]:
        true = find(labels, "loss mask", f"labels, {reading.where}")
        if true is not None and true.shape == reading.values.shape:
            counts.append(int((reading.values == true).long().cumprod(1).sum()))
    return sum(counts) / max(len(counts), 1)


def format_report(report: Report) -> str:
    """Return the table, then the first difference and its cause."""
    lines = [f"needed: {report.needed}", f"found:  {report.found}", ""]
    lines.append(COLUMNS.format("stage", "largest", "its bound", "differing", "of", "verdict"))
    verdicts = {verdict.stage: verdict for verdict in report.stages}
    lines += [_format_row(stage, verdicts.get(stage)) for stage in STAGES if stage in verdicts or stage not in ONLY_DFLASH2]
    accepted = report.accepted_per_block
    lines += [
        "",
        f"accepted drafts per block: needed {accepted.needed:.2f}, found {accepted.found:.2f} ({report.num_blocks} blocks)",
    ]
    if report.first_difference is None:
        lines.append(f"the same: no number is further apart than {ROUNDING:.0e} of its row's largest (float32 on both sides)")
    else:
        described = _describe(verdicts[report.first_difference])
        lines += ["", f"first difference: {report.first_difference}", *described, f"likely cause: {report.cause}"]
    return "\n".join(lines + [f"warning: {warning}" for warning in report.warnings])


def _format_row(name: str, verdict: Verdict | None) -> str:
    if verdict is None:
        return COLUMNS.format(name, "", "", "", "", "given").rstrip()
    largest, bound = ("", "exact") if name in EXACT_STAGES else (f"{verdict.difference:.1e}", f"{verdict.bound:.1e}")
    word = "same" if verdict.same else "DIFFERS"
    return COLUMNS.format(name, largest, bound, f"{verdict.num_differing:,}", f"{verdict.num_values:,}", word)


def _describe(verdict: Verdict) -> list[str]:
    worst = verdict.worst
    if worst is None:
        return [f"  {verdict.note}"]
    return [
        f"  {worst.where}, row {worst.row}, channel {worst.channel}",
        f"  needed {worst.needed:.6g}, found {worst.found:.6g}, "
        f"apart {abs(worst.needed - worst.found):.3g}, bound {worst.bound:.3g}",
    ]
