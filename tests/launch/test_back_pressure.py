"""One side many times slower than the other: nothing piles up, and the verdict names the slow side."""

from pathlib import Path

import msgspec
import pytest

from common.actor.faults import Fault
from launch.control import Operator
from launch.operate.control_messages import RunStatus
from tests.builders.launched_runs import LaunchedRun


@pytest.mark.parametrize(
    ("name", "point", "verdict"),
    [("drafter-0", "drafter.before_step", "drafter bound"), ("target-0", "target.mid_forward", "target bound")],
)
def test_the_verdict_names_the_slow_side(run: LaunchedRun, name: str, point: str, verdict: str) -> None:
    run.directory.mkdir()
    faults = {name: [Fault(point=point, action="sleep", sleep_s=0.3)]}
    (run.directory / "faults.json").write_bytes(msgspec.json.encode(faults))
    run.start()
    run.wait_for_step(2)
    operator = Operator(run.directory)

    def is_settled(status: RunStatus) -> bool:
        waiting = status.targets_waiting, status.drafters_waiting
        return status.verdict == verdict and max(share or 0.0 for share in waiting) > 0.5

    run.wait_until(lambda: is_settled(operator.status()))
    before = resident_bytes(run)
    step = max(run.losses())
    run.wait_for_step(step + 4)
    assert operator.status().verdict == verdict
    assert resident_bytes(run) < 1.05 * before
    assert {state for ring in operator.status().rings for state in ring.slots} <= {"free", "writing", "ready", "reading"}
    operator.close()


def resident_bytes(run: LaunchedRun) -> int:
    """Add up all processes of the run; shared memory counts in each."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in run.pids()]
    return sum(pages) * 4096
