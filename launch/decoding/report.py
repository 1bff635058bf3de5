"""The result of an evaluation: figures per category and in total, as JSON and as text. B block size."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.table import Column, Table

from common.acceptance import Acceptance, Evaluation
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
    """Greedy answers with drafts compared with plain ones."""

    num_same: int
    num_ties: int  # other tokens from where two logits were nearer than rounding
    num_other: int  # other tokens for no such reason


class Figures(Acceptance, frozen=True, kw_only=True):
    """The answers of a category, or all answers."""

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
    """The models, the machine and the options of an evaluation."""

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
    held_out: Evaluation | None = None  # of all held-out rows of a run, counted without decoding

    def write(self, folder: Path) -> None:
        """Write `folder`/evaluation.json in one piece."""
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "evaluation.json", self)

    @property
    def is_same(self) -> bool:
        """Return True if no greedy answer differs, ties included."""
        return not self.partings

    def table(self) -> Table:
        """Return a row per category and one for the total; the last columns are the shares accepted by draft position."""
        positions = map(str, range(1, self.setup.block_size))
        numbers = ("answers", "tokens", "acceptance", "passes saved", *positions)
        table = Table("category", *(Column(name, justify="right", no_wrap=True) for name in numbers), box=None, pad_edge=False)
        for name, found in [*self.categories.items(), ("total", self.total)][-1 if len(self.categories) == 1 else 0 :]:
            counts = (
                str(found.num_answers),
                str(found.num_answer_tokens),
                f"{found.acceptance:.2f}",
                f"{found.passes_saved:.1%}",
            )
            table.add_row(name, *counts, *(f"{share:.2f}" for share in found.acceptance_per_position))
        return table

    def lines(self) -> list[str]:
        """Return the totals, the turns that were left out, and whether the answers are equal, as text."""
        total, plain, fast = self.total, self.total.plain, self.total.speculative
        lines = [
            f"target passes      plain {plain.num_target_passes}, speculative {fast.num_target_passes}",
            f"acceptance length  {total.acceptance:.2f} tokens per verification round, {total.num_rounds} rounds",
        ]
        if total.speedup is not None:
            on_cpu = "; on a CPU this says nothing of a GPU" if self.setup.device == "cpu" else ""
            times = f"plain {plain.ms_per_token:.2f} ms, speculative {fast.ms_per_token:.2f} ms"
            lines.append(f"time per token     {times}: {total.speedup:.2f} times as fast{on_cpu}")
        lines += [f"left out           {count} turns: {reason}" for reason, count in self.left_out.items()]
        return lines + self._verdict()

    def _verdict(self) -> list[str]:
        found = self.total.lossless
        if found is None:
            return ["same tokens        not compared: the answers were sampled"]
        if self.is_same:
            return ["same tokens        yes"]
        lines = [_describe(parting, self.setup.dtype) for parting in self.partings[:_MAX_DIFFERENCES]]
        if len(self.partings) > len(lines):
            lines.append(f"and {len(self.partings) - len(lines)} more")
        counts = f"{found.num_same} of {self.total.num_answers} the same, {found.num_ties} ties, {found.num_other} other"
        ties = "" if found.num_other else ": ties within rounding"
        return [*lines, f"answers            {counts}", f"same tokens        no{ties}"]


def make_report(setup: Setup, turns: Sequence[Turn], left_out: dict[str, int]) -> Report:
    """Add up the turns; at least one is needed."""
    names = dict.fromkeys(turn.case.category for turn in turns)
    return Report(
        setup=setup,
        total=_figures(turns, setup),
        categories={name: _figures([turn for turn in turns if turn.case.category == name], setup) for name in names},
        partings=[
            Parting(name=case.name, category=case.category, turn=number, difference=found, is_tie=found.is_tie)
            for case, number, *_, found in turns
            if found is not None
        ],
        left_out=left_out,
    )


def _figures(turns: Sequence[Turn], setup: Setup) -> Figures:
    accepted = np.array([count for turn in turns for count in turn.speculative.accepted], np.int64)
    plain, fast = _speed([turn.plain for turn in turns]), _speed([turn.speculative for turn in turns])
    return Figures(
        **msgspec.structs.asdict(summarise(np.bincount(accepted, minlength=setup.block_size))),
        num_answers=len(turns),
        num_answer_tokens=sum(len(turn.speculative.tokens) for turn in turns),
        passes_saved=1 - fast.num_target_passes / plain.num_target_passes,
        plain=plain,
        speculative=fast,
        speedup=plain.ms_per_token / fast.ms_per_token if plain.ms_per_token and fast.ms_per_token else None,
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
    is_tie = [turn.difference.is_tie for turn in turns if turn.difference is not None]
    return Lossless(num_same=len(turns) - len(is_tie), num_ties=sum(is_tie), num_other=len(is_tie) - sum(is_tie))


def _describe(parting: Parting, dtype: str) -> str:
    found = parting.difference
    where = f"{parting.name}, turn {parting.turn}: the answers differ from token {found.index} on"
    if found.gap is None:
        return f"{where}: one of them ends there, which rounding does not explain"
    measured = f"the logits of {found.plain_token} and {found.speculative_token} are {found.gap:.3g} apart"
    rounding = f"rounding in {dtype} moves such gaps by up to {found.rounding:.3g}"
    return f"{where}: {measured}, {rounding}: {'a tie' if parting.is_tie else 'NOT a tie'}"
