"""The notice board: one writer per record, read without a message."""

import os
import subprocess
import sys
import time

import pytest

from common.actor.board import Board, Notice, Notices, Phase, board_bytes
from common.errors import SharedMemoryError
from common.ring import memory


def make_fd(num_actors: int) -> int:
    return memory.create("test-board", board_bytes(num_actors))


def test_records_are_read_by_index() -> None:
    fd = make_fd(40)
    board = Board(fd, 40)
    began = time.monotonic()
    notices = Notices(fd, 39, pid=77)
    notices.phase(Phase.READY)
    notices.add(num_batches=2, num_tokens=30, waiting_s=0.5)
    notices.add(num_batches=1, waiting_s=0.25)
    notices.show_step(4, 9, 1.5, num_skipped=2)
    notices.show_acceptance(2.75)
    notice = board.read(39)
    assert began <= notice.progress_s <= time.monotonic()
    assert notice._replace(progress_s=0.0) == Notice(77, Phase.READY, 0.0, 4, 9, 3, 30, 0.75, 1.5, 2.75, 0, False, 2)
    assert board.read(38) == Notice(0, Phase.STARTING, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, False)
    os.close(fd)


def test_drafters_read_their_group_and_who_has_joined() -> None:
    fd = make_fd(3)
    board, notices = Board(fd, 3), Notices(fd, 2, pid=77)
    board.start_group(41)
    assert board.group == Board(fd, 3).group == 41
    notices.come_to_group(41)
    with notices.collective():
        assert (board.read(2).group, board.read(2).in_collective) == (41, True)
    assert not board.read(2).in_collective
    assert board.read(0) == Notice(0, Phase.STARTING, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, False)
    os.close(fd)


def test_another_process_writes_its_record() -> None:
    fd = make_fd(2)
    board = Board(fd, 2)
    program = f"import os; from common.actor.board import Notices; Notices({fd}, 1, os.getpid()).show_step(3, 8, 0.125)"
    child = subprocess.Popen([sys.executable, "-c", program], pass_fds=[fd])
    assert child.wait() == 0
    assert (board.read(1).pid, board.read(1).step, board.read(1).loss) == (child.pid, 3, 0.125)
    assert board.read(0).pid == 0
    os.close(fd)


def test_a_wipe_clears_the_record_and_starts_its_clock() -> None:
    fd = make_fd(2)
    board = Board(fd, 2)
    for index in range(2):
        Notices(fd, index, pid=index + 1).show_step(3, 8, 0.125)
    began = time.monotonic()
    board.wipe(0)
    assert board.read(0).progress_s >= began
    assert board.read(0)._replace(progress_s=0.0) == Notice(0, Phase.STARTING, 0.0, 0, 0, 0, 0, 0.0, 0.0, 0.0, 0, False)
    assert (board.read(1).pid, board.read(1).step) == (2, 3)
    os.close(fd)


def test_memory_of_another_size_is_refused() -> None:
    fd = make_fd(1)
    with pytest.raises(SharedMemoryError, match=r"board memory: needed 106496 bytes, found 4096"):
        Board(fd, 1000)
    os.close(fd)
