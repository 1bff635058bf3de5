"""An actor dies with its supervisor, from its first line on."""

import os
import select
import signal
import sys
from pathlib import Path

import pytest

from common.actor.lifecycle import EXIT_FAILED
from tests.builders.actor_stage import SLEEP, WAIT_S, Stage


def test_an_actor_dies_with_its_parent(stage: Stage) -> None:
    """The parent is killed, so nothing of it can have told the actor; its pidfd tells when the actor is dead."""
    parent = stage.spawn_parent_of(stage.command(SLEEP, "PARENT"))
    stage.wait_until_ready()
    pidfd = os.pidfd_open(stage.board.read(0).pid)
    assert select.select([pidfd], [], [], 0)[0] == []
    os.kill(parent.pid, signal.SIGKILL)
    assert select.select([pidfd], [], [], WAIT_S)[0] == [pidfd]
    os.close(pidfd)


@pytest.mark.parametrize("role", ["exchange", "target", "drafter"])
def test_an_actor_dies_with_its_parent_also_while_it_imports(
    stage: Stage, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import of numpy that never ends stands for the seconds that torch takes."""
    mark = tmp_path / "importing"
    slow = tmp_path / "slow"
    slow.mkdir()
    (slow / "numpy.py").write_text(
        f"import os, time\nopen({str(mark)!r} + '.new', 'w').write(str(os.getpid()))\n"
        f"os.rename({str(mark)!r} + '.new', {str(mark)!r})\ntime.sleep(600)"
    )
    monkeypatch.setenv("PYTHONPATH", str(slow), prepend=os.pathsep)
    parent = stage.spawn_parent_of([sys.executable, "-m", f"services.{role}", "--parent", "PARENT"])
    stage.wait_until(mark.exists)
    pidfd = os.pidfd_open(int(mark.read_text()))
    os.kill(parent.pid, signal.SIGKILL)
    died = select.select([pidfd], [], [], WAIT_S)[0]
    signal.pidfd_send_signal(pidfd, signal.SIGKILL) if not died else None
    os.close(pidfd)
    assert died == [pidfd]


def test_an_actor_whose_parent_is_gone_already_does_not_begin(stage: Stage) -> None:
    child = stage.start(SLEEP, parent=1)
    assert child.wait(WAIT_S) == EXIT_FAILED
    assert stage.log.read_text() == "" and stage.board.read(0).pid == 0
