"""Named points at which a test makes a process die, stop or sleep. Without `<run>/faults.json` they do nothing.

The tests and `launch.bench faults` reach exact instants with them, between which a kill from outside falls by chance.
Faults are no setting: a run that a person starts has no such file.

    {"target-0": [{"point": "target.before_slot_ready", "visit": 3, "action": "kill"}]}

A fault happens at the given visit of the point within one incarnation; `sleep` happens at every visit. The others
happen once per run and in the order of the list: the second waits for an incarnation that began after the first.
"""

import os
import signal
import time
from pathlib import Path
from typing import Literal

import msgspec

from common.errors import ConfigError
from common.run_dir import FAULTS

_ONCE = ("kill", "stop")


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An action on one actor at one point."""

    point: str
    visit: int = 1
    action: Literal["kill", "stop", "sleep"] = "kill"
    sleep_s: float = 0.0


class _Planned:
    def __init__(self, fault: Fault, mark: Path) -> None:
        self.fault = fault
        self.mark = mark
        self.num_visits = 0


_planned: list[_Planned] = []


def read(run_dir: Path) -> dict[str, list[Fault]]:
    """Return the faults of every actor; none without the file, ConfigError if it holds anything else."""
    path = run_dir / FAULTS
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, list[Fault]])
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: needed the faults of actors as in common/actor/faults.py: {error}") from error


def load(run_dir: Path, name: str) -> None:
    """Plan the faults of this actor, once, at the start of an incarnation."""
    faults = read(run_dir).get(name, [])
    planned = [_Planned(fault, run_dir / f"fault-{name}-{index}.happened") for index, fault in enumerate(faults)]
    _planned.extend(plan for plan in planned if plan.fault.action not in _ONCE)
    _planned.extend([plan for plan in planned if plan.fault.action in _ONCE and not plan.mark.exists()][:1])


def reach(point: str) -> None:
    """Say that the process is at `point`."""
    for planned in _planned:
        if planned.fault.point == point:
            planned.num_visits += 1
            _act(planned)


def _act(planned: _Planned) -> None:
    fault = planned.fault
    if fault.action == "sleep":
        time.sleep(fault.sleep_s)
    elif fault.action in _ONCE and planned.num_visits == fault.visit and not planned.mark.exists():
        planned.mark.touch()
        os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
