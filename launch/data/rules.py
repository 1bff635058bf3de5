"""The rules by which rows are dropped or changed. Each has a name, and each row falls under one at most."""

from collections import Counter
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from common.data.arrow_file import Int32Array, Sample

BUCKET_LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_MAX_REFUSALS = 20  # reasons counted one by one: some quote the row
_EXACT_IDS_HINT = (
    "hint: the chat template rewrites what was said, such as its reasoning, so the answer cannot be found in the render: "
    "only rows with exact ids can serve (launch.regenerate)"
)


class Dropped(StrEnum):
    """Rules by which nothing of a row is used."""

    NOT_JSON = "not JSON"
    NO_CONVERSATION = "neither a conversation nor token ids"
    EMPTY = "an empty conversation"
    BAD_MESSAGE = "a message without a role or without text"
    UNKNOWN_ROLE = "an unknown role (see --assistant-role)"
    BAD_TOOLS = "tools that are no list of objects"
    BAD_TOOL_CALLS = "tool calls that are no list of functions with arguments"
    BAD_TEXT = "text that is no Unicode"
    BAD_IDS = "token ids that are no integers, or a mask of another length"
    NO_QUESTION = "no turn of the user or a tool before an answer"
    NO_ANSWER = "no assistant turn"
    REFUSED = "refused by the chat template"
    UNSEEN_CALL = "a tool call that the chat template does not show"
    REWRITTEN = "an answer that does not continue its generation prompt"
    NOT_SUPERVISED = "no supervised token"
    SINGLE = "no two supervised tokens in a row"
    TOO_LONG = "longer than --max-length"
    CUT_BEFORE_ANSWER = "no supervised token within --max-length"
    UNKNOWN_ID = "an id outside the vocabulary"
    DUPLICATE = "the same tokens as an earlier row"
    WEIGHT = "left out by the weight of its data set"


class Changed(StrEnum):
    """Changes of a row that is used."""

    LEADING_ANSWER = "answers before the first question removed"
    EMPTY_ANSWER = "an empty answer is not supervised"
    UNSEEN_CALL = "a tool call that the template does not show is not supervised"
    UNSEEN_TOOLS = "tools that the chat template does not show"
    UNFINISHED = "an answer cut at its token limit is not taught to stop"
    PER_TURN = "one row per answer, as it was served"
    SOME_TURNS = "some of its answers dropped"
    TRUNCATED = "cut at --max-length"


Reason = Dropped | Changed


class Outcome(NamedTuple):
    """The samples of a row, the rule it falls under, and the reason of a template that refused it."""

    samples: list[Sample]
    reason: Reason | None = None
    refusal: str = ""

    def of_category(self, category: str) -> "Outcome":
        """Return the outcome with the category of the row in every sample."""
        return self._replace(samples=[sample._replace(category=category) for sample in self.samples])


class Limits(NamedTuple):
    """The limits of a sample."""

    vocab_size: int
    max_length: int
    truncate: bool = False  # instead of dropping what is too long


def check(sample: Sample, limits: Limits) -> Sample | Dropped:
    """Return the sample, cut where it is allowed, or the rule that drops it."""
    input_ids, loss_mask, _ = sample
    if len(input_ids) == 0 or not loss_mask.any():
        return Dropped.NOT_SUPERVISED
    if input_ids.min() < 0 or input_ids.max() >= limits.vocab_size:
        return Dropped.UNKNOWN_ID
    if not _has_pair(sample):
        return Dropped.SINGLE
    if len(input_ids) <= limits.max_length:
        return sample
    if not limits.truncate:
        return Dropped.TOO_LONG
    cut = sample._replace(input_ids=input_ids[: limits.max_length], loss_mask=loss_mask[: limits.max_length])
    return cut if _has_pair(cut) else Dropped.CUT_BEFORE_ANSWER


def check_all(outcome: Outcome, limits: Limits) -> Outcome:
    """Check every sample of a row and name the row's rule."""
    checked = [check(sample, limits) for sample in outcome.samples]
    kept = [sample for sample in checked if isinstance(sample, Sample)]
    if checked and not kept:
        return Outcome([], next(rule for rule in checked if isinstance(rule, Dropped)))
    if len(kept) < len(checked):
        return Outcome(kept, Changed.SOME_TURNS)
    if any(len(after.input_ids) < len(before.input_ids) for before, after in zip(outcome.samples, kept, strict=True)):
        return Outcome(kept, Changed.TRUNCATED)
    return outcome._replace(samples=kept)


def _has_pair(sample: Sample) -> bool:
    """Return whether a block can be drafted at all: a supervised token after a supervised one."""
    return bool((sample.loss_mask[:-1] & sample.loss_mask[1:]).any())


class Tally:
    """Counts rows by rule and samples by length."""

    def __init__(self) -> None:
        self.num_rows_in = self.num_rows_kept = self.num_supervised_tokens = 0
        self.reasons: Counter[Reason] = Counter()
        self.refusals: Counter[str] = Counter()
        self.lengths: list[int] = []

    def count(self, outcome: Outcome) -> None:
        self.num_rows_in += 1
        self.num_rows_kept += bool(outcome.samples)
        if outcome.reason is not None:
            self.reasons[outcome.reason] += 1
        if outcome.refusal:
            is_named = outcome.refusal in self.refusals or len(self.refusals) < _MAX_REFUSALS
            self.refusals[outcome.refusal if is_named else "for other reasons"] += 1
        for sample in outcome.samples:
            self.num_supervised_tokens += int(sample.loss_mask.sum())
            self.lengths.append(len(sample.input_ids))

    def as_json(self) -> dict[str, Any]:
        """Return the content of report.json."""
        rules: dict[str, dict[str, int]] = {"changed": {}, "dropped": {}}
        for reason, count in self.reasons.most_common():
            rules["dropped" if isinstance(reason, Dropped) else "changed"][str(reason)] = count
        return {
            "rows_in": self.num_rows_in,
            "rows_kept": self.num_rows_kept,
            **rules,
            "refusals": dict(self.refusals.most_common()),
            "samples": len(self.lengths),
            "tokens": sum(self.lengths),
            "supervised_tokens": self.num_supervised_tokens,
            "truncated_share": self.reasons[Changed.TRUNCATED] / max(1, self.num_rows_kept),
            "samples_by_length": histogram(np.array(self.lengths, np.int32)),
        }


def histogram(lengths: Int32Array) -> dict[str, int]:
    """Count samples per bucket of lengths, from the first bucket to the last that holds any."""
    counts = np.bincount(np.searchsorted(BUCKET_LENGTHS, lengths)).tolist()
    starts = [1, *(bound + 1 for bound in BUCKET_LENGTHS)]
    names = [f"{start}-{bound}" for start, bound in zip(starts, [*BUCKET_LENGTHS, ""], strict=True)]
    return dict(zip(names, counts, strict=False))


def format_report(report: dict[str, Any]) -> str:
    """Return `Tally.as_json` as a table."""
    lines = [("rows in", report["rows_in"]), ("rows kept", report["rows_kept"])]
    for kind in ("changed", "dropped"):
        for name, count in report[kind].items():
            lines.append((f"  {kind}: {name}", count))
            lines += [(f"    {text}", n) for text, n in report.get("refusals", {}).items() if name == Dropped.REFUSED]
    lines += [(name.replace("_", " "), report[name]) for name in ("samples", "tokens", "supervised_tokens")]
    lines += [(f"  {name} tokens", count) for name, count in report["samples_by_length"].items()]
    table = "\n".join(f"{name:<66}{count:>14,}" for name, count in lines)
    table = f"{table}\n{'share truncated':<66}{report['truncated_share']:>14.2%}"
    return f"{table}\n{_EXACT_IDS_HINT}" if Dropped.REWRITTEN in report["dropped"] else table
