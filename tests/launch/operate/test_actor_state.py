"""The states of an actor and the verdicts on its ends, as tables."""

import itertools
import signal

import pytest

from common.actor.lifecycle import EXIT_DONE, EXIT_FAILED, EXIT_HOPELESS, EXIT_STOPPED
from common.errors import TransitionError
from launch.operate.actor_state import TRANSITIONS, Circumstances, Edge, State, Verdict, judge, move

KILLED = -signal.SIGKILL
LIVING = (State.ALIVE, State.HUNG, State.REPLACED)
ROLES = ("exchange", "target", "drafter")


def test_every_edge_leads_where_the_drawing_says() -> None:
    drawn = {
        (State.DOWN, Edge.START): State.ALIVE,
        (State.DOWN, Edge.REPLACE): State.DOWN,
        (State.ALIVE, Edge.HANG): State.HUNG,
        (State.DONE, Edge.CALL): State.DOWN,
    }
    for state in LIVING:
        drawn |= {
            (state, Edge.REPLACE): State.REPLACED,
            (state, Edge.RESTART): State.DOWN,
            (state, Edge.FINISH): State.DONE,
            (state, Edge.LEAVE): State.ENDED,
        }
    assert drawn == TRANSITIONS
    for state, edge in itertools.product(State, Edge):
        if (state, edge) in drawn:
            assert move(state, edge) == drawn[state, edge]
        else:
            with pytest.raises(TransitionError, match=f"^actor: {state.name} has no edge {edge.name}$"):
                move(state, edge)


@pytest.mark.parametrize(
    ("states", "code", "roles", "was_ready", "is_stopping", "verdict"),
    [
        (LIVING, EXIT_DONE, ["drafter"], [True, False], [True, False], Verdict.DONE),
        (LIVING, EXIT_STOPPED, ROLES, [True, False], [True], Verdict.STOPPED),
        ([State.REPLACED], EXIT_DONE, ["exchange", "target"], [True, False], [True, False], Verdict.REPLACED),
        ([State.REPLACED], EXIT_STOPPED, ROLES, [True, False], [False], Verdict.REPLACED),
        ([State.REPLACED], EXIT_HOPELESS, ROLES, [True, False], [True, False], Verdict.REPLACED),
        ([State.REPLACED], KILLED, ROLES, [True, False], [True, False], Verdict.REPLACED),
        ([State.ALIVE, State.HUNG], EXIT_HOPELESS, ROLES, [False], [True, False], Verdict.BAD_INPUT),
        ([State.ALIVE, State.HUNG], EXIT_HOPELESS, ["target"], [True], [True, False], Verdict.BAD_INPUT),
        ([State.ALIVE, State.HUNG], EXIT_HOPELESS, ["exchange", "drafter"], [True], [True, False], Verdict.HOPELESS),
        ([State.ALIVE, State.HUNG], EXIT_FAILED, ROLES, [False], [True, False], Verdict.HOPELESS),
        ([State.ALIVE, State.HUNG], EXIT_STOPPED, ROLES, [False], [False], Verdict.HOPELESS),
        ([State.ALIVE, State.HUNG], EXIT_FAILED, ROLES, [True], [True, False], Verdict.CRASHED),
        ([State.ALIVE, State.HUNG], EXIT_STOPPED, ROLES, [True], [False], Verdict.CRASHED),
        ([State.ALIVE, State.HUNG], EXIT_DONE, ["exchange", "target"], [True, False], [True, False], Verdict.CRASHED),
        ([State.ALIVE, State.HUNG], KILLED, ROLES, [True, False], [True, False], Verdict.CRASHED),
    ],
)
def test_verdict_on_an_end(
    states: tuple[State, ...], code: int, roles: list[str], was_ready: list[bool], is_stopping: list[bool], verdict: Verdict
) -> None:
    for state in states:
        for circumstances in itertools.starmap(Circumstances, itertools.product(roles, was_ready, is_stopping)):
            assert judge(state, code, circumstances) == verdict, (state, circumstances)
