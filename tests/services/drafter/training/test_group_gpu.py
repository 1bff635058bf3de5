"""The group of two ranks as processes: sums, gradients, a rank that dies in a collective, one that dies before it connects.

On CPUs with gloo, on two GPUs with nccl.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from common import config as configuration
from common.actor.board import Board, Notices, board_bytes
from common.actor.faults import Fault
from common.ring import memory

ROOT = Path(__file__).parents[4]
NUM_ACTORS, FIRST_DRAFTER = 5, 3
TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


class Ranks:
    """Two ranks and their supervisor."""

    def __init__(self, run_dir: Path, devices: list[str]) -> None:
        self._run_dir, self._devices = run_dir, devices
        configuration.write(configuration.load(ROOT / "launch" / "configs" / "tiny.toml", []), run_dir)
        self.board_fd = memory.create("board", board_bytes(NUM_ACTORS))
        self.board = Board(self.board_fd, NUM_ACTORS)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, rank: int) -> None:
        line = [sys.executable, str(ROOT / "tests/builders/group_rank.py"), str(self._run_dir), str(rank)]
        with self._output(rank).open("ab") as output:
            self.processes[rank] = subprocess.Popen(
                [*line, str(self.board_fd), self._devices[rank]],
                stdout=output,
                stderr=output,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
                pass_fds=[self.board_fd],
            )

    def lines(self, rank: int) -> list[dict[str, Any]]:
        path = self._output(rank)
        texts = path.read_text().splitlines() if path.exists() else []
        return [json.loads(text) for text in texts if text.startswith("{") and text.endswith("}")]

    def sums(self, rank: int, incarnation: int) -> list[dict[str, Any]]:
        return [line for line in self.lines(rank) if line.get("incarnation") == incarnation]

    def wait_until(self, holds: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not holds():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.02)

    def logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self._run_dir.glob("rank-*.log")))

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        os.close(self.board_fd)

    def _output(self, rank: int) -> Path:
        return self._run_dir / f"rank-{rank}.log"


@pytest.fixture
def ranks(tmp_path: Path, devices: list[str]) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path, devices)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("devices", [["cpu", "cpu"], pytest.param(["cuda:0", "cuda:1"], marks=TWO_GPUS)])
def test_a_rank_that_dies_in_a_collective_is_replaced_and_the_survivor_goes_on(
    ranks: Ranks, tmp_path: Path, devices: list[str]
) -> None:
    dies = Fault("drafter.mid_collective", 5)
    (tmp_path / "faults.json").write_bytes(msgspec.json.encode({"drafter-1": [dies]}))
    for rank in (0, 1):
        ranks.start(rank)
    ranks.board.start_group(1)
    assert ranks.processes[1].wait(120) == -signal.SIGKILL, ranks.logs()
    died_s = time.monotonic()
    assert all(line["whole"] for line in ranks.sums(0, incarnation=1))
    ranks.board.wipe(FIRST_DRAFTER + 1)
    ranks.start(1)
    ranks.board.start_group(2)
    ranks.wait_until(lambda: len(ranks.sums(0, incarnation=2)) > 2 and len(ranks.sums(1, incarnation=2)) > 2)
    assert ranks.processes[0].poll() is None
    assert ranks.lines(0).count({"broken": True}) == 1
    for rank in (0, 1):
        assert all(line["whole"] for line in ranks.lines(rank) if "whole" in line)
    lines = [line for rank in (0, 1) for line in ranks.lines(rank)]
    differences = [line["gradient_difference"] for line in lines if "gradient_difference" in line]
    pause_s = ranks.sums(0, incarnation=2)[0]["time_s"] - died_s
    print(f"{devices}: next sum {pause_s:.2f} s after the death; gradients differ by {differences}")
    assert len(differences) == 4
    assert max(differences) < (1e-2 if devices[0].startswith("cuda") else 1e-5)


@pytest.mark.parametrize("devices", [pytest.param(["cuda:0", "cuda:1"], marks=TWO_GPUS)])
def test_a_rank_that_dies_while_connecting_blocks_no_other(ranks: Ranks, devices: list[str]) -> None:
    """Mark rank 1 as joined although it never connects: rank 0 is alone in nccl's first collective, which never ends."""
    ranks.start(0)
    ranks.board.start_group(1)
    Notices(ranks.board_fd, FIRST_DRAFTER + 1, os.getpid()).come_to_group(1)
    ranks.wait_until(lambda: ranks.board.read(FIRST_DRAFTER).group == 1)
    time.sleep(5)
    ranks.board.wipe(FIRST_DRAFTER + 1)
    ranks.start(1)
    ranks.board.start_group(2)
    ranks.wait_until(lambda: len(ranks.sums(0, incarnation=2)) > 0 and len(ranks.sums(1, incarnation=2)) > 0)
    assert ranks.sums(0, incarnation=2)[0]["whole"]
