"""Held-out acceptance, as metrics and checkpoints record it, and the best of a run. B block size."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from common.run_dir import CHECKPOINTS
from common.sealed_record import is_intact


class Acceptance(msgspec.Struct, frozen=True, kw_only=True):
    """The result of rounds of greedy verification."""

    acceptance: float  # tokens emitted per round, between 1 and B; 0 when there was no round
    acceptance_per_position: list[float]  # share of rounds that emitted draft token k = 1 .. B - 1; 1 + their sum = acceptance
    num_rounds: int
    num_tokens: int


class SetAcceptance(Acceptance, frozen=True, kw_only=True):
    """One evaluation set, and the categories that its samples name."""

    categories: dict[str, Acceptance]


class SelectorReport(msgspec.Struct, frozen=True, kw_only=True):
    """The part of the candidate selector in the acceptance of DFlash 2."""

    acceptance_unary: float  # without it: every slot takes its likeliest token
    acceptance_oracle: float  # the most that any choice among the candidates reaches
    recall_per_position: list[float]  # share of the labels of slot k = 1 .. B - 1 that are among its candidates


class Evaluation(Acceptance, frozen=True, kw_only=True):
    """All evaluation sets of a run, after one optimizer step."""

    step: int
    acceptance_other_prompt: float  # the control: with another prompt's hidden states
    sets: dict[str, SetAcceptance]
    selector: SelectorReport | None = None  # of DFlash 2

    def rows(self) -> Iterator[tuple[str, Acceptance]]:
        """Yield every set, followed by its categories as set/category."""
        for name, of_set in self.sets.items():
            yield name, of_set
            yield from ((f"{name}/{category}", found) for category, found in of_set.categories.items())


class _Record(msgspec.Struct):
    evaluation: Evaluation | None = None


def find_best(run_dir: Path) -> Evaluation | None:
    """Return the highest held-out acceptance among the checkpoints of a run, the first of equals; None if there is none.

    Checkpoints may come and go meanwhile; a checkpoint that is being written does not count.
    """
    found = (_read(path) for path in sorted((run_dir / CHECKPOINTS).glob("step-*[0-9]/checkpoint.json")))
    measured = [evaluation for evaluation in found if evaluation is not None]
    return max(measured, key=lambda evaluation: evaluation.acceptance, default=None)


def _read(path: Path) -> Evaluation | None:
    try:
        content = path.read_bytes()
        return msgspec.json.decode(content, type=_Record).evaluation if is_intact(content) else None
    except (OSError, msgspec.DecodeError):
        return None
