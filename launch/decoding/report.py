"""What an evaluation found: per category and in total, as typed figures and as text. B block size."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from common.acceptance import Acceptance
from common.run_dir import write_json
from launch.decoding.answer import Decoding
from launch.decoding.comparison import Turn
from launch.decoding.difference import Difference
from services.drafter.model.acceptance import summarise

_MAX_DIFFERENCES = 5  # shown; all are in the file


class Speed(msgspec.Struct, frozen=True, kw_only=True):
    """One way of decoding. The time per token leaves out the prefill and the token that it gives."""

    num_target_passes: int
    prefill_s: float
    decode_s: float
    ms_per_token: float | None  # null where every answer was a single token


class Lossless(msgspec.Struct, frozen=True, kw_only=True):
    """Greedy answers with drafts against plain ones."""

    num_same: int
    num_ties: int  # other tokens from where two logits were nearer than rounding
    num_other: int  # other tokens for no such reason


class Figures(Acceptance, frozen=True, kw_only=True):
    """A category, or all."""

    num_answers: int
    num_answer_tokens: int
    passes_saved: float  # share of the plain target passes
    plain: Speed
    speculative: Speed
    speedup: float | None  # of the time per token
    lossless: Lossless | None  # null where answers were sampled


class Parting(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that came out differently."""

    name: str
    category: str
    turn: int
    difference: Difference
    is_tie: bool


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured and how."""

    target: str
    drafter: str
    dtype: str
    device: str
    releases: dict[str, str]
    block_size: int
    max_new_tokens: int
    temperature: float
    top_p: float
    seed: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The content of evaluation.json."""

    setup: Setup
    total: Figures
    categories: dict[str, Figures]
    partings: list[Parting]
    left_out: dict[str, int]  # why -> how many turns

    def write(self, folder: Path) -> None:
        """Write `folder`/evaluation.json in one piece."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "evaluation.json", self)

    @property
    def is_same(self) -> bool:
        """No greedy answer differs, ties included."""
        return not self.partings

    def lines(self) -> list[str]:
        """The text that a person reads."""
        names = list(self.categories) if len(self.categories) > 1 else []
        width = max(len(name) for name in ["category", "total", *names])
        head = f"{'category':{width}}  answers   tokens  acceptance  passes saved   at position 1, 2, ..."
        rows = [_row(name, self.categories[name], width) for name in names]
        table = [head, *rows, _row("total", self.total, width)]
        left_out = [f"left out           {count} turns: {reason}" for reason, count in self.left_out.items()]
        return [*table, "", *self._totals(), *left_out, *self._verdict()]

    def _totals(self) -> list[str]:
        total = self.total
        plain, fast = total.plain, total.speculative
        lines = [
            f"target passes      plain {plain.num_target_passes}, speculative {fast.num_target_passes}",
            f"acceptance length  {total.acceptance:.2f} tokens per verification round, {total.num_rounds} rounds",
        ]
        if plain.ms_per_token is not None and fast.ms_per_token is not None and total.speedup is not None:
            times = (
                f"plain {plain.ms_per_token:.2f} ms, speculative {fast.ms_per_token:.2f} ms: {total.speedup:.2f} times as fast"
            )
            on_cpu = "; on a CPU this says nothing of a GPU" if self.setup.device == "cpu" else ""
            lines.append(f"time per token     {times}{on_cpu}")
        return lines

    def _verdict(self) -> list[str]:
        if self.total.lossless is None:
            return ["same tokens        not compared: the answers were sampled"]
        lines = [_describe(parting, self.setup.dtype) for parting in self.partings[:_MAX_DIFFERENCES]]
        more = len(self.partings) - len(lines)
        if more > 0:
            lines.append(f"and {more} more")
        if not self.partings:
            return ["same tokens        yes"]
        found, num_answers = self.total.lossless, self.total.num_answers
        lines.append(
            f"answers            {found.num_same} of {num_answers} the same, {found.num_ties} ties, {found.num_other} other"
        )
        return [*lines, "same tokens        no" + ("" if found.num_other else ": ties within rounding")]


def make_report(setup: Setup, turns: Sequence[Turn], left_out: dict[str, int]) -> Report:
    """Add up what was decoded; at least one turn."""
    names = dict.fromkeys(turn.case.category for turn in turns)
    of_name = {name: [turn for turn in turns if turn.case.category == name] for name in names}
    return Report(
        setup=setup,
        total=_figures(turns, setup),
        categories={name: _figures(found, setup) for name, found in of_name.items()},
        partings=list(_partings(turns)),
        left_out=left_out,
    )


def _figures(turns: Sequence[Turn], setup: Setup) -> Figures:
    accepted = [count for turn in turns for count in turn.speculative.accepted]
    acceptance = summarise(np.bincount(np.array(accepted, np.int64), minlength=setup.block_size))
    plain, fast = (_speed([getattr(turn, way) for turn in turns]) for way in ("plain", "speculative"))
    both = plain.ms_per_token, fast.ms_per_token
    return Figures(
        **msgspec.structs.asdict(acceptance),
        num_answers=len(turns),
        num_answer_tokens=sum(len(turn.speculative.tokens) for turn in turns),
        passes_saved=1 - fast.num_target_passes / plain.num_target_passes,
        plain=plain,
        speculative=fast,
        speedup=both[0] / both[1] if both[0] is not None and both[1] else None,
        lossless=_lossless(turns) if setup.temperature == 0 else None,
    )


def _speed(answers: Sequence[Decoding]) -> Speed:
    decode_s, num_tokens = sum(answer.decode_s for answer in answers), sum(len(answer.tokens) - 1 for answer in answers)
    return Speed(
        num_target_passes=sum(answer.num_target_passes for answer in answers),
        prefill_s=sum(answer.prefill_s for answer in answers),
        decode_s=decode_s,
        ms_per_token=1e3 * decode_s / num_tokens if num_tokens else None,
    )


def _lossless(turns: Sequence[Turn]) -> Lossless:
    differences = [turn.difference for turn in turns if turn.difference is not None]
    num_ties = sum(difference.is_tie for difference in differences)
    return Lossless(num_same=len(turns) - len(differences), num_ties=num_ties, num_other=len(differences) - num_ties)


def _partings(turns: Iterable[Turn]) -> Iterable[Parting]:
    for turn in turns:
        found = turn.difference
        if found is not None:
            yield Parting(
                name=turn.case.name, category=turn.case.category, turn=turn.number, difference=found, is_tie=found.is_tie
            )


def _row(name: str, figures: Figures, width: int) -> str:
    positions = " ".join(f"{share:.2f}" for share in figures.acceptance_per_position)
    return (
        f"{name:{width}}  {figures.num_answers:7}  {figures.num_answer_tokens:7}  {figures.acceptance:10.2f}  "
        f"{figures.passes_saved:12.1%}   {positions}"
    )


def _describe(parting: Parting, dtype: str) -> str:
    found = parting.difference
    where = f"{parting.name}, turn {parting.turn}: the answers differ from token {found.place} on"
    if found.gap is None or found.rounding is None:
        return f"{where}: one of them ends there, which rounding does not explain"
    measured = f"the logits of {found.plain_token} and {found.speculative_token} are {found.gap:.3g} apart"
    rounding = f"rounding in {dtype} moves such gaps by up to {found.rounding:.3g}"
    return f"{where}: {measured}, {rounding}: {'a tie' if parting.is_tie else 'NOT a tie'}"
