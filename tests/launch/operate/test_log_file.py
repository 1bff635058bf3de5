"""Logs: cut while they are written, and followed over the cut."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from launch.operate.log_file import follow, last_lines, limit, predecessor

WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND)
for line in sys.stdin:
    os.write(fd, line.encode())
    print(flush=True)
"""
HEADER = "2026-11-29 12:00:00,000 I ---- target-0 started, pid 7 ----\n"


def test_a_log_within_its_limit_stays(tmp_path: Path) -> None:
    log = tmp_path / "target-0.log"
    limit(log, 100)
    log.write_text("x" * 100)
    limit(log, 100)
    assert [path.name for path in tmp_path.iterdir()] == ["target-0.log"]


def test_a_log_is_cut_under_a_writer_that_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "target-0.log"
    log.write_text("old\n" + HEADER)
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdin is not None and writer.stdout is not None

    def write(line: str) -> None:
        print(line, file=writer.stdin, flush=True)
        assert writer.stdout is not None and writer.stdout.readline()

    write("first")
    limit(log, 10)
    assert predecessor(log).read_text() == "old\n" + HEADER + "first\n"
    write("second")
    assert log.read_text() == HEADER + "second\n"  # and nothing before it: the writer appends
    limit(log, 10)
    assert (predecessor(log).read_text(), log.read_text()) == (HEADER + "second\n", HEADER)
    assert last_lines(log, 1) == [HEADER.rstrip()]
    writer.communicate()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["target-0.log", "target-0.log.1"]


def next_text(texts: Iterator[str]) -> str:
    return next(text for text in texts if text)


def test_following_goes_on_over_cuts(tmp_path: Path) -> None:
    log = tmp_path / "target-0.log"
    log.write_text("before\n")
    texts = follow(log, position=log.stat().st_size)
    assert next(texts) == ""
    with log.open("a") as file:
        print("first", file=file)
    assert next_text(texts) == "first\n"
    with log.open("a") as file:
        print("second", file=file)
    limit(log, 1)
    assert next_text(texts) == "second\n"  # from the predecessor
    with log.open("a") as file:
        print("third", file=file)
    assert next_text(texts) == "third\n"
    assert last_lines(tmp_path / "absent.log", 3) == []
