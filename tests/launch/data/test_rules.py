"""Rules that drop or change a row, and the table that counts them."""

import numpy as np
import pytest

from common.data.arrow_file import Sample
from launch.data.rules import Changed, Dropped, Limits, Outcome, Tally, check, check_all, format_report, histogram

LIMITS = Limits(vocab_size=100, max_length=6)


def make_sample(mask: list[int], first_id: int = 0) -> Sample:
    return Sample(np.arange(first_id, first_id + len(mask), dtype=np.int32), np.array(mask, np.bool_))


@pytest.mark.parametrize(
    ("mask", "rule"),
    [
        ([0, 0, 0], Dropped.NOT_SUPERVISED),
        ([], Dropped.NOT_SUPERVISED),
        ([0, 1, 0], Dropped.SINGLE),
        ([1, 0, 1], Dropped.SINGLE),
        ([0] * 5 + [1, 1], Dropped.TOO_LONG),
        ([0, 0, 0, 0, 1, 1], None),  # in the last block only: two are enough for it
        ([1, 1], None),
    ],
)
def test_what_can_be_learnt_from_is_kept(mask: list[int], rule: Dropped | None) -> None:
    sample = make_sample(mask)
    assert check(sample, LIMITS) is (rule or sample)


def test_ids_outside_the_vocabulary_are_dropped() -> None:
    assert check(make_sample([1, 1], first_id=99), LIMITS) is Dropped.UNKNOWN_ID
    assert check(make_sample([1, 1], first_id=-1), LIMITS) is Dropped.UNKNOWN_ID
    assert isinstance(check(make_sample([1, 1], first_id=98), LIMITS), Sample)


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ([0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]),  # inside the answer
        ([0, 0, 0, 0, 0, 1, 1, 1], Dropped.CUT_BEFORE_ANSWER),  # one supervised token is left
        ([0, 0, 0, 0, 0, 0, 0, 1, 1], Dropped.CUT_BEFORE_ANSWER),  # inside the prompt
    ],
)
def test_truncation_keeps_what_is_left_of_the_answer(mask: list[int], kept: list[int] | Dropped) -> None:
    outcome = check_all(Outcome([make_sample(mask)]), LIMITS._replace(truncate=True))
    if isinstance(kept, Dropped):
        assert outcome == Outcome([], kept)
    else:
        assert outcome.reason is Changed.TRUNCATED
        assert outcome.samples[0].loss_mask.astype(int).tolist() == kept


def test_a_row_of_which_some_samples_are_dropped_is_changed() -> None:
    good = make_sample([0, 1, 1])
    assert check_all(Outcome([good, make_sample([0, 0])], Changed.PER_TURN), LIMITS) == Outcome([good], Changed.SOME_TURNS)


def test_every_row_is_counted_once() -> None:
    tally = Tally()
    for outcome in (
        Outcome([make_sample([0, 1, 1])]),
        Outcome([make_sample([0] * 100 + [1] * 50), make_sample([1, 1])], Changed.PER_TURN),
        Outcome([], Dropped.REFUSED, "turns must alternate"),
        Outcome([], Dropped.REFUSED, "turns must alternate"),
        Outcome([make_sample([1, 1, 1, 0])], Changed.TRUNCATED),
    ):
        tally.count(outcome)
    report = tally.as_json()
    assert report == {
        "rows_in": 5,
        "rows_kept": 3,
        "changed": {"one row per answer, as it was served": 1, "cut at --max-length": 1},
        "dropped": {"refused by the chat template": 2},
        "refusals": {"turns must alternate": 2},
        "samples": 4,
        "tokens": 159,
        "supervised_tokens": 57,
        "truncated_share": 1 / 3,
        "samples_by_length": {"1-128": 3, "129-256": 1},
    }
    table = dict(line.rsplit(maxsplit=1) for line in format_report(report).splitlines())
    assert (
        table["  dropped: refused by the chat template"] == table["    turns must alternate"] == "2"
        and table["share truncated"] == "33.33%"
    )


def test_reasons_of_refusals_are_bounded() -> None:
    tally = Tally()
    for number in range(1000):
        tally.count(Outcome([], Dropped.REFUSED, f"no room for {number}"))
    assert len(tally.refusals) == 21 and tally.refusals["for other reasons"] == 980


def test_a_render_that_rewrites_answers_needs_exact_ids() -> None:
    tally = Tally()
    tally.count(Outcome([], Dropped.NO_ANSWER))
    assert "launch.regenerate" not in format_report(tally.as_json())
    tally.count(check_all(Outcome([], Dropped.REWRITTEN), LIMITS))
    assert "only rows with exact ids can serve (launch.regenerate)" in format_report(tally.as_json())


def test_a_refusal_keeps_its_reason() -> None:
    refused = Outcome([], Dropped.REFUSED, "turns must alternate")
    assert check_all(refused.of_category("code"), LIMITS) == refused


def test_lengths_are_counted_by_bucket() -> None:
    lengths = np.array([1, 128, 129, 256, 257, 40000], np.int32)
    counts = {name: count for name, count in histogram(lengths).items() if count}
    assert counts == {"1-128": 2, "129-256": 2, "257-512": 1, "32769-": 1}
    assert histogram(lengths[:0]) == {}
