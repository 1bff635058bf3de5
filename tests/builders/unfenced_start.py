"""start_all with a supervisor that takes a hung actor for dead without killing it: the negative control of fencing."""

import signal
import sys
import time
from unittest.mock import patch

from launch import start_all
from launch.operate.child import Child, Exit
from launch.operate.supervisor import Supervisor


class UnfencedSupervisor(Supervisor):
    """Reclaims the slots of an actor that may still write to them."""

    def _kill_if_due(self, child: Child) -> None:
        if time.monotonic() < child.due_s:
            return
        child.last_exit = Exit(-signal.SIGKILL, child._owner)
        child._process, child._pidfd = None, -1
        self._handle_exit(child, child.last_exit)


if __name__ == "__main__":
    with patch("launch.operate.run.Supervisor", UnfencedSupervisor):
        sys.exit(start_all.main())
