"""Logs: renamed between two incarnations, and followed over the rename."""

from collections.abc import Iterator
from pathlib import Path

from launch.operate.log_file import follow, last_lines, last_message, rotate


def test_only_a_log_that_is_too_large_is_renamed(tmp_path: Path) -> None:
    log = tmp_path / "target-0.log"
    rotate(log, 100)
    log.write_text("x" * 100)
    rotate(log, 100)
    assert [path.name for path in tmp_path.iterdir()] == ["target-0.log"]
    rotate(log, 99)
    assert [path.name for path in tmp_path.iterdir()] == ["target-0.log.1"]


def next_text(texts: Iterator[str]) -> str:
    return next(text for text in texts if text)


def test_following_goes_on_over_a_rename(tmp_path: Path) -> None:
    log = tmp_path / "target-0.log"
    log.write_text("before\n")
    texts = follow(log, position=log.stat().st_size)
    assert next(texts) == ""
    with log.open("a") as file:
        print("first", file=file)
    assert next_text(texts) == "first\n"
    with log.open("a") as file:
        print("second", file=file)
    rotate(log, 1)
    assert next_text(texts) == "second\n"  # from the renamed one
    assert next(texts) == ""  # its successor does not exist yet
    log.write_text("third\n")
    assert next_text(texts) == "third\n"


def test_the_end_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "target-0.log"
    assert (last_lines(log, 3), last_message(log)) == ([], "")
    log.write_text("first\n2026-11-29 12:00:00,000 E second\n")
    assert last_lines(log, 1) == ["2026-11-29 12:00:00,000 E second"]
    assert last_message(log) == "second"
