"""The process plan as a value."""

from pathlib import Path

import pytest

from common import config as configuration
from launch.operate.topology import ActorSpec, SharedFds, command, describe, describe_gpus, inherited_fds, plan_topology
from tests.builders.launched_runs import CONFIG

FDS = SharedFds(rings=[10, 11], control=12, board=13)
RUN = Path("/runs/a")


def test_actors_come_in_the_order_of_their_start() -> None:
    topology = plan_topology(configuration.load(CONFIG, ['drafters.devices=["cuda:5"]', "plan.batches_per_step=1"]))
    assert [(spec.name, spec.device, spec.record) for spec in topology.actors] == [
        ("exchange", "cpu", 0),
        ("target-0", "cpu", 1),
        ("target-1", "cpu", 2),
        ("drafter-0", "cuda:5", 3),
    ]


def test_memory_of_a_run() -> None:
    """A slot has a 4 KiB header, 256 tokens x 2 taps x 32 x 2 bytes and the rows, rounded up to 2 MiB."""
    topology = plan_topology(configuration.load(CONFIG, ["ring.num_slots=3"]))
    assert topology.num_rings == 2
    assert topology.ring_bytes == 3 * 2 * 2**20
    assert topology.table_bytes == 2 * 4096  # a head and one page for 6 records of 64 bytes
    assert topology.board_bytes == 4096
    assert topology.shared_bytes == 12 * 2**20 + 3 * 4096
    assert describe(topology).endswith("\n  2 rings of 0.006 GiB, 0.012 GiB shared memory in all")


@pytest.mark.parametrize(
    ("role", "index", "fds", "ending"),
    [
        ("exchange", 0, [13, 12], ["--control-fd", "12"]),
        ("target", 1, [13, 11], ["--ring-fd", "11"]),
        ("drafter", 1, [13, 10, 11], ["--ring-fds", "10,11"]),
    ],
)
def test_an_actor_gets_the_memory_it_may_touch_and_no_more(role: str, index: int, fds: list[int], ending: list[str]) -> None:
    spec = ActorSpec(role, index, "cpu", record=4)
    assert inherited_fds(spec, FDS) == fds
    assert command("py", spec, RUN, FDS, supervisor_pid=99) == [
        *["py", "-m", f"services.{role}", "--run-dir", "/runs/a", "--index", str(index)],
        *["--record", "4", "--parent", "99", "--board-fd", "13"],
        *ending,
    ]


def test_gpus_of_a_run_are_shown_with_their_memory_and_users() -> None:
    devices = ['targets.devices=["cuda:1+cuda:0", "cpu+cpu"]', 'drafters.devices=["cuda:1", "cuda:2"]']
    topology = plan_topology(configuration.load(CONFIG, devices))
    assert [spec.device for spec in topology.actors[1:3]] == ["cuda:1+cuda:0", "cpu+cpu"]
    assert topology.num_rings == 2
    assert describe_gpus(topology, [80 * 2**30, 141 * 2**30]).splitlines() == [
        "",
        "  cuda:0       80.0 GiB   target-0",
        "  cuda:1       141.0 GiB  target-0, drafter-0",
        "  cuda:2       absent     drafter-1",
    ]
    assert describe_gpus(plan_topology(configuration.load(CONFIG, [])), []) == ""
