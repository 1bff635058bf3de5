"""The state of an actor as its supervisor sees it: a drawing, a table and two functions.

               START           HANG
      DOWN ----------> ALIVE --------> HUNG
      ^  ^               |               |
      |  |       REPLACE |               | REPLACE
      |  |               v               |
      |  |            REPLACED <---------+
      |  |               |
      |  +---- RESTART --+-- FINISH --> DONE ----+
      |                  |                       |
      |                  +-- LEAVE ---> ENDED    |
      +------------------------------------------+ CALL

START    its time has come                     RESTART  it died, and starts again
HANG     no progress: it writes its stacks     FINISH   a drafter came to the end of the training
REPLACE  an operator ends this incarnation     LEAVE    it was stopped, or the run was given up
CALL     a drafter that was done is needed by its group again

RESTART, FINISH and LEAVE start from ALIVE, HUNG and REPLACED alike. REPLACE of an actor that is DOWN starts it now.
"""

import enum
from typing import NamedTuple

from common.actor.lifecycle import EXIT_DONE, EXIT_HOPELESS, EXIT_STOPPED
from common.errors import TransitionError


class State(enum.Enum):
    DOWN = "down"
    ALIVE = "alive"
    HUNG = "hung"
    REPLACED = "replaced"
    DONE = "done"
    ENDED = "ended"


class Edge(enum.Enum):
    START = "start"
    HANG = "hang"
    REPLACE = "replace"
    RESTART = "restart"
    FINISH = "finish"
    LEAVE = "leave"
    CALL = "call"


_LIVING = (State.ALIVE, State.HUNG, State.REPLACED)
TRANSITIONS: dict[tuple[State, Edge], State] = {
    (State.DOWN, Edge.START): State.ALIVE,
    (State.DOWN, Edge.REPLACE): State.DOWN,
    (State.ALIVE, Edge.HANG): State.HUNG,
    (State.DONE, Edge.CALL): State.DOWN,
    **{(state, Edge.REPLACE): State.REPLACED for state in _LIVING},
    **{(state, Edge.RESTART): State.DOWN for state in _LIVING},
    **{(state, Edge.FINISH): State.DONE for state in _LIVING},
    **{(state, Edge.LEAVE): State.ENDED for state in _LIVING},
}


def move(state: State, edge: Edge) -> State:
    """Return the state after `edge`; TransitionError where `state` has no such edge."""
    after = TRANSITIONS.get((state, edge))
    if after is None:
        raise TransitionError(f"actor: {state.name} has no edge {edge.name}")
    return after


class Verdict(enum.Enum):
    """Meaning of the end of an incarnation."""

    DONE = "done"  # the training came to its end
    STOPPED = "stopped"  # it was stopped in good order
    REPLACED = "replaced"  # an operator wanted this end
    BAD_INPUT = "bad input"  # it refused the input of the run
    HOPELESS = "hopeless"  # the next incarnation would end in the same way
    CRASHED = "crashed"


class Circumstances(NamedTuple):
    """Facts that a verdict needs beside state and exit code."""

    role: str
    was_ready: bool  # this incarnation or an earlier one
    is_stopping: bool  # the actors were stopped


def judge(state: State, exit_code: int, circumstances: Circumstances) -> Verdict:
    """Return the meaning of an end in `state`; the exit code is as in common/actor/lifecycle.py, or minus a signal number."""
    role, was_ready, is_stopping = circumstances
    if exit_code == EXIT_DONE and role == "drafter":
        return Verdict.DONE
    if exit_code == EXIT_STOPPED and is_stopping:
        return Verdict.STOPPED
    if state == State.REPLACED:
        return Verdict.REPLACED
    if exit_code == EXIT_HOPELESS:
        reads_data = role == "target"  # a target that was ready ends so only at a damaged row
        return Verdict.BAD_INPUT if reads_data or not was_ready else Verdict.HOPELESS
    if exit_code > 0 and not was_ready:
        return Verdict.HOPELESS
    return Verdict.CRASHED
