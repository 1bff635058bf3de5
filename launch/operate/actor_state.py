"""The state of an actor as its supervisor sees it: a drawing, a table and two functions.

               START           HANG
      DOWN ----------> ALIVE --------> HUNG
      ^  ^               |               |
      |  |         RENEW |               | RENEW
      |  |               v               |
      |  |            RENEWED <----------+
      |  |               |
      |  +---- RESTART --+-- FINISH --> DONE ----+
      |                  |                       |
      |                  +-- LEAVE ---> ENDED    |
      +------------------------------------------+ CALL

START    its time has come                     RESTART  it died, and is to be started again
HANG     no progress: its stacks are asked for FINISH   a drafter came to the end of the training
RENEW    an operator ends this life            LEAVE    it was told to stop, or the run was given up
CALL     a drafter that was done is needed by its group again

RESTART, FINISH and LEAVE start from ALIVE, HUNG and RENEWED alike. RENEW of an actor that is DOWN starts it now.
"""

import enum
from typing import NamedTuple

from common.actor.lifecycle import EXIT_DONE, EXIT_HOPELESS, EXIT_STOPPED
from common.errors import TransitionError


class State(enum.Enum):
    """How an actor is."""

    DOWN = "down"
    ALIVE = "alive"
    HUNG = "hung"
    RENEWED = "renewed"
    DONE = "done"
    ENDED = "ended"


class Edge(enum.Enum):
    """What may happen to an actor."""

    START = "start"
    HANG = "hang"
    RENEW = "renew"
    RESTART = "restart"
    FINISH = "finish"
    LEAVE = "leave"
    CALL = "call"


_LIVING = (State.ALIVE, State.HUNG, State.RENEWED)
TRANSITIONS: dict[tuple[State, Edge], State] = {
    (State.DOWN, Edge.START): State.ALIVE,
    (State.DOWN, Edge.RENEW): State.DOWN,
    (State.ALIVE, Edge.HANG): State.HUNG,
    (State.DONE, Edge.CALL): State.DOWN,
    **{(state, Edge.RENEW): State.RENEWED for state in _LIVING},
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
    """What the end of a life means."""

    DONE = "done"  # the training came to its end
    STOPPED = "stopped"  # it was told to stop, and did
    RENEWED = "renewed"  # an operator wanted this end
    BAD_INPUT = "bad input"  # it refused what a person gave to the run
    HOPELESS = "hopeless"  # the next life would end in the same way
    CRASHED = "crashed"


class Circumstances(NamedTuple):
    """What the supervisor knows of a life beside its state."""

    role: str
    was_ready: bool  # this life or an earlier one
    is_stopping: bool  # the actors were told to stop


def judge(state: State, exit_code: int, circumstances: Circumstances) -> Verdict:
    """Return what the end of a life means.

    Args:
        state: of the actor when it ended.
        exit_code: as in common/actor/lifecycle.py, or minus a signal number.
        circumstances: of its life.
    """
    role, was_ready, is_stopping = circumstances
    if exit_code == EXIT_DONE and role == "drafter":
        return Verdict.DONE
    if exit_code == EXIT_STOPPED and is_stopping:
        return Verdict.STOPPED
    if state == State.RENEWED:
        return Verdict.RENEWED
    if exit_code == EXIT_HOPELESS:
        reads_data = role == "target"  # what a target meets after it was ready is a damaged row
        return Verdict.BAD_INPUT if reads_data or not was_ready else Verdict.HOPELESS
    if exit_code > 0 and not was_ready:
        return Verdict.HOPELESS
    return Verdict.CRASHED
