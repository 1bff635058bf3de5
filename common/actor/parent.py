"""The tie of an actor to its supervisor. An actor runs it before its slow imports, so this file has none."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_EXIT_ORPHANED = 1


def die_with_parent() -> None:
    """Die as soon as the process dies that `--parent PID` names on the command line; exit now if it is dead already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = sys.argv[sys.argv.index("--parent") + 1] if "--parent" in sys.argv[:-1] else None
    if parent is not None and parent != str(os.getppid()):  # it died before the call of prctl
        os._exit(_EXIT_ORPHANED)
