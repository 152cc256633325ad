"""The table of a replica's states: every state with every event is in it, or can't happen, with the reason."""

import itertools

import pytest

from proxima.engine.http.client import Address
from proxima.engine.http.replica import FRUITLESS, REFUSALS, Replica
from proxima.engine.http.replica_pool import STREAK, ReplicaPool
from proxima.engine.http.replica_states import IN_SERVICE, MAY_RETURN, OUT_OF_SERVICE, TRANSITIONS, Action, Event, State
from tests.engine.http.plain_dialect import Plain, PlainDialect

OF_A_RETURN = (Event.RETURNED, Event.STILL_AWAY, Event.STILL_REFUSED)
BUSY = (State.BUSY, State.BUSY_SUSPECT)

IMPOSSIBLE = {  # state and event: why
    **{(s, e): "only what is out of service is asked to return" for s in IN_SERVICE for e in OF_A_RETURN},
    **{(State.BARRED, e): "it is not asked to return" for e in OF_A_RETURN},
    **{(s, Event.HOPELESS): "follows an ejection at once" for s in State if s not in (State.AWAY, State.REFUSING)},
    **{(s, Event.RESTED): "a break begins with it and ends with an ejection" for s in State if s not in BUSY},
    **{(s, Event.CHECKED): "an answer after an ejection does not count" for s in OUT_OF_SERVICE},
}


@pytest.mark.parametrize("state", State)
def test_every_event_is_in_the_table_or_impossible(state):
    for event in Event:
        assert ((state, event) in TRANSITIONS) != ((state, event) in IMPOSSIBLE), (state, event)


def test_every_state_and_action_is_reached():
    reached = {State.AWAY}
    while more := {to for (at, _), (to, _) in TRANSITIONS.items() if at in reached} - reached:
        reached |= more
    assert reached == set(State)
    assert {action for _, action in TRANSITIONS.values()} == set(Action)
    assert set(State) == IN_SERVICE | OUT_OF_SERVICE and not IN_SERVICE & OUT_OF_SERVICE


def test_only_a_ready_replica_is_given_work():
    replica = replica_at(State.AWAY)
    for state, pause in itertools.product(State, ("none", "held", "stopped")):
        replica.state, replica.pause = state, pause
        assert replica.ready == (state is State.READY and pause == "none")
        assert replica.in_service == (state in IN_SERVICE)


def test_a_busy_replica_keeps_its_break_and_a_suspect_one_its_health_check():
    """Whatever order both come and end in."""
    for events in itertools.permutations((Event.FAILED, Event.OVERLOADED)):
        for ends in itertools.permutations((Event.CHECKED, Event.RESTED)):
            state = State.READY
            for event in events:
                state, _ = TRANSITIONS[state, event]
            assert state is State.BUSY_SUSPECT
            state, first = TRANSITIONS[state, ends[0]]
            assert state is not State.READY and first is Action.NOTHING
            if ends[1] is Event.CHECKED:
                assert TRANSITIONS[state, ends[1]] == (State.READY, Action.DISPATCH)


def test_nothing_leads_out_of_barred_and_only_a_return_back_to_service():
    for (at, event), (to, action) in TRANSITIONS.items():
        if at is State.BARRED:
            assert to is at
        if at in OUT_OF_SERVICE and to in IN_SERVICE:
            assert at in MAY_RETURN and event is Event.RETURNED and action is Action.WELCOME
        if at in IN_SERVICE and to in OUT_OF_SERVICE:
            assert action in (Action.LEAVE, Action.LEAVE_AND_ASK)


@pytest.mark.parametrize(("event", "most"), [(Event.REFUSED, REFUSALS), (Event.EJECTED, FRUITLESS)])
def test_a_replica_that_is_ejected_again_and_again_is_barred(event, most):
    replica = replica_at(State.READY)
    pool = ReplicaPool([replica], Plain())
    for times in range(1, most + 1):
        assert replica.in_service
        pool.move(replica, event, "no")
        if times < most:
            pool.move(replica, Event.RETURNED)
    assert replica.state is State.BARRED and replica.refuses_key == (event is Event.REFUSED)
    assert replica.reason == f"no ({most} times in a row, without a completion between)"
    pool.move(replica, event, "late")
    assert replica.reason.startswith("no (") and pool.counts["ejected"] == most


def test_a_completion_between_makes_it_count_again():
    replica = replica_at(State.READY)
    pool = ReplicaPool([replica], Plain())
    for _ in range(2 * REFUSALS):
        pool.move(replica, Event.REFUSED, "no")
        pool.move(replica, Event.RETURNED)
        replica.succeeded()
    assert replica.state is State.READY and pool.counts["returned"] == 2 * REFUSALS and replica.streak < STREAK


def replica_at(state: State) -> Replica:
    replica = Replica(Address("http://127.0.0.1:1"), PlainDialect(), Plain(), "tag")
    replica.state = state
    return replica
