"""Figures as lines of JSON, over any number of lives."""

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import DataError
from common.metrics import MetricsWriter, read_metrics
from common.run_dir import metrics_path


def test_lines_come_back_in_order_with_all_their_digits(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, "drafter-0")
    for step in range(3):
        writer.write(step=step, loss=0.1 + step / 3, name="Größe\u2028")
    assert list(read_metrics(tmp_path, "drafter-0")) == [
        {"step": step, "loss": 0.1 + step / 3, "name": "Größe\u2028"} for step in range(3)
    ]
    assert list(read_metrics(tmp_path, "drafter-1")) == []


def test_null_stands_for_figures_that_are_not_finite(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, "drafter-0").write(loss=math.nan, bounds=[math.inf, 1.5, -math.inf])
    assert metrics_path(tmp_path, "drafter-0").read_text() == '{"loss":null,"bounds":[null,1.5,null]}\n'
    assert list(read_metrics(tmp_path, "drafter-0")) == [{"loss": None, "bounds": [None, 1.5, None]}]


def test_a_torn_last_line_is_left_out_and_spoils_no_later_one(tmp_path: Path) -> None:
    MetricsWriter(tmp_path, "target-0").write(batch=1)
    with metrics_path(tmp_path, "target-0").open("ab") as file:
        file.write(b'{"batch": 2, "num_to')
    assert list(read_metrics(tmp_path, "target-0")) == [{"batch": 1}]
    MetricsWriter(tmp_path, "target-0").write(batch=3)
    assert list(read_metrics(tmp_path, "target-0")) == [{"batch": 1}, {"batch": 3}]


@pytest.mark.parametrize("line", ["[1, 2]", "garbage", "7", "\0\0"])
def test_a_line_that_was_never_an_object_is_named(tmp_path: Path, line: str) -> None:
    MetricsWriter(tmp_path, "target-0").write(batch=1)
    path = metrics_path(tmp_path, "target-0")
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(DataError, match=rf"^{re.escape(str(path))}: line 2: needed a JSON object, found b'"):
        list(read_metrics(tmp_path, "target-0"))


def test_a_new_incarnation_appends_and_a_whole_last_line_stays(tmp_path: Path) -> None:
    for batch in range(3):
        MetricsWriter(tmp_path, "target-0").write(batch=batch)
    assert metrics_path(tmp_path, "target-0").read_text() == '{"batch":0}\n{"batch":1}\n{"batch":2}\n'


def test_a_kill_leaves_whole_lines(tmp_path: Path) -> None:
    program = """
import sys
from pathlib import Path
from common.metrics import MetricsWriter
writer = MetricsWriter(Path(sys.argv[1]), "target-0")
step = 0
while True:
    writer.write(step=step, text="x" * 500)
    print(step, flush=True)
    step += 1
"""
    child = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child.stdout:
        while child.stdout.readline() != b"50\n":
            pass
        os.kill(child.pid, signal.SIGKILL)
    child.wait()
    steps = [figures["step"] for figures in read_metrics(tmp_path, "target-0")]
    assert len(steps) > 50 and steps == list(range(len(steps)))
