"""Figures and text of an evaluation, from outcomes written down by hand."""

import pytest
from rich.console import Console

from launch.decoding.answer import Decoding
from launch.decoding.cases import Case, Turns
from launch.decoding.comparison import Turn
from launch.decoding.difference import Difference
from launch.decoding.report import Lossless, Report, Setup, make_report

SETUP = Setup(
    target="target",
    drafter="drafter",
    dtype="bfloat16",
    device="a GPU",
    releases={},
    block_size=4,
    max_new_tokens=9,
    temperature=0.0,
    top_p=1.0,
    seed=0,
)
TIE = Difference(index=2, plain_token=5, speculative_token=6, gap=0.125, rounding=0.25)
OTHER = Difference(index=3, plain_token=5, speculative_token=6, gap=0.5, rounding=0.25)
CUT = Difference(index=4, plain_token=5, speculative_token=None)


def no_turns() -> Turns:
    yield from ()


def turns_of(category: str, accepted: list[list[int]], differences: list[Difference | None]) -> list[Turn]:
    """Answers of the given rounds; altogether a second of prefill either way, then 8 and 2 seconds."""
    turns: list[Turn] = []
    for rounds, difference in zip(accepted, differences, strict=True):
        length, share = 1 + sum(count + 1 for count in rounds), 1 / len(accepted)
        plain = Decoding(list(range(length)), length, [], share, 8.0 * share)
        fast = Decoding(list(range(length)), 1 + len(rounds), rounds, share, 2.0 * share)
        turns.append(Turn(Case(f"case {len(turns)}", category, no_turns()), 0, [1], plain, fast, difference))
    return turns


def report_of(*differences: Difference | None) -> Report:
    first = turns_of("code", [[3, 0], [1]], [*differences, None, None][:2])
    return make_report(
        SETUP, [*first, *turns_of("chat", [[0, 0, 0]], [None]), *turns_of("chat", [[]], [None])], {"too long": 2}
    )


def test_figures_add_up() -> None:
    report = report_of()
    code, chat = report.categories["code"], report.categories["chat"]
    assert (code.num_rounds, code.num_tokens) == (3, 7)
    assert code.acceptance == pytest.approx(7 / 3)
    assert code.acceptance_per_position == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert (code.num_answers, code.num_answer_tokens) == (2, 9)
    assert (code.plain.num_target_passes, code.speculative.num_target_passes) == (9, 5)
    assert code.passes_saved == pytest.approx(4 / 9)
    assert code.plain.ms_per_token == pytest.approx(8000 / 7)
    assert code.speedup == pytest.approx(4.0)
    assert (chat.num_answers, chat.num_rounds, chat.acceptance) == (2, 3, 1.0)
    assert report.total.num_rounds == 6
    assert report.total.plain.prefill_s == 3.0
    assert report.total.lossless == Lossless(num_same=4, num_ties=0, num_other=0)
    assert report.is_same


def rows_of(report: Report) -> list[list[str]]:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(report.table())
    return [line.split() for line in capture.get().splitlines()]


def test_table_has_a_row_per_category_and_a_column_per_position() -> None:
    assert rows_of(report_of()) == [
        ["category", "answers", "tokens", "acceptance", "passes", "saved", "1", "2", "3"],
        ["code", "2", "9", "2.33", "44.4%", "0.67", "0.33", "0.33"],
        ["chat", "2", "5", "1.00", "0.0%", "0.00", "0.00", "0.00"],
        ["total", "4", "14", "1.67", "28.6%", "0.33", "0.17", "0.17"],
    ]
    assert len(rows_of(make_report(SETUP, turns_of("chat", [[1]], [None]), {}))) == 2  # one category is the total


def test_text_says_what_was_left_out() -> None:
    lines = report_of().lines()
    assert "target passes      plain 14, speculative 10" in lines
    assert "acceptance length  1.67 tokens per verification round, 6 rounds" in lines
    assert "left out           2 turns: too long" in lines
    assert lines[-1] == "same tokens        yes"
    assert not any("on a CPU" in line for line in lines)


def test_ties_and_other_differences_are_counted_apart() -> None:
    report = report_of(TIE, OTHER)
    assert report.total.lossless == Lossless(num_same=2, num_ties=1, num_other=1)
    assert report.categories["chat"].lossless == Lossless(num_same=2, num_ties=0, num_other=0)
    assert not report.is_same
    text = "\n".join(report.lines())
    assert "case 0, turn 0: the answers differ from token 2 on: the logits of 5 and 6 are 0.125 apart" in text
    assert "rounding in bfloat16 moves such gaps by up to 0.25: a tie" in text
    assert "0.5 apart, rounding in bfloat16 moves such gaps by up to 0.25: NOT a tie" in text
    assert text.endswith("same tokens        no")
    assert report_of(TIE).lines()[-1] == "same tokens        no: ties within rounding"
    assert "one of them ends there, which rounding does not explain" in "\n".join(report_of(CUT).lines())


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    report = make_report(SETUP, turns_of("chat", [[]], [None]), {})
    assert report.total.plain.ms_per_token is None
    assert report.total.speedup is None
    assert not any("time per token" in line for line in report.lines())
