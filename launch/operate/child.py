"""One actor as a child process: started, watched through a pidfd, ended, and started again."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from common.actor.lifecycle import start_time
from common.ring.slot_table import Owner
from common.run_dir import log_path
from launch.operate.actor_state import Edge, State, move
from launch.operate.log_file import rotate
from launch.operate.topology import ActorSpec, SharedFds, command, inherited_fds

_ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "PYTHONUNBUFFERED": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # batches of many shapes fragment nothing
}
SPLIT_ENVIRONMENT = {
    "CUDA_SCALE_LAUNCH_QUEUES": "4x"
}  # one thread launches for several GPUs: a full queue of one starves another


class Exit(NamedTuple):
    """End of an incarnation: an exit code, or minus a signal number as in subprocess."""

    code: int
    owner: Owner

    def __str__(self) -> str:
        return f"exit code {self.code}" if self.code >= 0 else f"signal {signal.Signals(-self.code).name}"


class Child:
    """An actor of the topology and its current process, if any."""

    def __init__(self, spec: ActorSpec, run_dir: Path) -> None:
        self.spec = spec
        self.log = log_path(run_dir, spec.name)
        self.state = State.DOWN
        self.due_s = 0.0  # when to start it where it is DOWN, to kill it where it is HUNG or REPLACED
        self.was_ready = False  # in this incarnation or an earlier one
        self.started_s = 0.0
        self.last_exit: Exit | None = None
        self.num_batches = 0  # of the incarnations that have ended
        self._run_dir = run_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = Owner(0, 0)
        self._pidfd = -1

    @property
    def alive(self) -> bool:
        """Return whether it was started and its end was not taken yet."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Process id of the latest incarnation."""
        return self._owner.pid

    def move(self, edge: Edge, due_s: float = 0.0) -> None:
        """Follow an edge of launch/operate/actor_state.py; `due_s` says when the new state ends, where it ends by itself."""
        self.state, self.due_s = move(self.state, edge), due_s

    def start(self, fds: SharedFds) -> None:
        """Start a process. Call from the main thread: the parent-death signal is tied to the thread that spawns."""
        assert self._process is None, f"{self.spec.name} is alive"
        self.log.parent.mkdir(exist_ok=True)
        rotate(self.log)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command(sys.executable, self.spec, self._run_dir, fds, os.getpid()),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=Path(__file__).parents[2],
                env={**os.environ, **_ENVIRONMENT, **(SPLIT_ENVIRONMENT if "+" in self.spec.device else {})},
                pass_fds=inherited_fds(self.spec, fds),
                start_new_session=True,
            )
        self._owner = Owner(self._process.pid, start_time(self._process.pid))
        self._pidfd = os.pidfd_open(self._process.pid)
        self.started_s = time.monotonic()

    def send(self, signum: signal.Signals) -> None:
        """Signal the process, if any; SIGKILL goes to its whole session."""
        if self._process is None:
            return
        if signum == signal.SIGKILL:
            os.killpg(self._process.pid, signum)
        else:
            signal.pidfd_send_signal(self._pidfd, signum)  # Popen's own would reap an end that take_exit has not seen

    def take_exit(self) -> Exit | None:
        """Return the end of the process, once, after the kernel reported it."""
        if self._process is None or not select.select([self._pidfd], [], [], 0)[0]:
            return None
        self.last_exit = Exit(self._process.wait(), self._owner)
        os.close(self._pidfd)
        self._process = None
        return self.last_exit


def wait_for_exit(children: list[Child], timeout_s: float) -> None:
    """Sleep until one of the children ends, or for `timeout_s`."""
    select.select([child._pidfd for child in children if child.alive], [], [], timeout_s)
