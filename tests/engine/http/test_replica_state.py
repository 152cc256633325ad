"""What happens to a server, event by event: when it is given work, ejected, asked again, and barred."""

import asyncio

import pytest

from proxima.engine.http.replica_state import (
    FRUITLESS,
    IN_SERVICE,
    LONGEST_WAIT,
    REFUSALS,
    STREAK,
    TRANSITIONS,
    ReplicaState,
    State,
)

EVENTS = {
    "produced": lambda s: s.produced(),
    "completed": lambda s: s.completed(),
    "call failed": lambda s: s.call_failed("status 500", 1.0, 2.0),
    "suspected": lambda s: s.suspected("odd"),
    "passed check": lambda s: s.passed_check(),
    "busy": lambda s: s.asked_for_break("busy", float, lambda: None),
    "break over": lambda s: s._end_break(lambda: None),
    "ejected": lambda s: s.ejected("broken", refused=False),
    "failed to load": lambda s: s.failed_to_load(),
}
AFTER = {  # the state after an event, where it is another
    State.READY: {"call failed": State.SUSPECT, "suspected": State.SUSPECT, "busy": State.BUSY, "ejected": State.AWAY},
    State.SUSPECT: {"passed check": State.READY, "ejected": State.AWAY},
    State.BUSY: {
        "call failed": State.SUSPECT,
        "suspected": State.SUSPECT,
        "break over": State.READY,
        "ejected": State.AWAY,
    },
}


def in_state(state):
    """A status with this state, as an event that came before has left it."""
    status = ReplicaState()
    if state in IN_SERVICE:
        status.joined()
    if state is State.SUSPECT:
        status.suspected("odd")
    elif state is State.BUSY:
        status.asked_for_break("busy", lambda _: 3600.0, lambda: None)
    elif state is State.LOCKED:
        status.failed_to_return("another key", refused=True)
    elif state is State.BARRED:
        for _ in range(REFUSALS):
            status.joined()
            status.ejected("another key", refused=True)
    assert status.state is state
    return status


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", State)
async def test_each_event_in_each_state(state, event):
    status = in_state(state)
    EVENTS[event](status)
    assert status.state is AFTER.get(state, {}).get(event, state)


@pytest.mark.parametrize("state", State)
async def test_no_other_way_leads_from_a_state(state):
    for other in State:
        status = in_state(state)
        if other is state or other in TRANSITIONS[state]:
            status._enter(other)
        else:
            with pytest.raises(RuntimeError, match=f"{state.name} can't become {other.name}"):
                status._enter(other)


def test_calls_that_fail_together_count_once():
    """However long it takes until the last has failed: the cause may have been momentary."""
    status = in_state(State.READY)
    for now in (10.0, 11.0, 12.0):
        assert not status.call_failed("status 500", 9.0, now)
    assert status.failures == 1
    assert not status.call_failed("status 500", 10.0, 13.0) and status.failures == 2  # it began after the first failure
    status.completed()
    assert status.failures == 0 and status.reason == ""


@pytest.mark.parametrize("before", [0, 1, 2])
def test_failures_in_a_row_eject_and_an_ejection_counts_as_that_many(before):
    """Also of a server that has been ejected before, and has completed nothing since."""
    status = in_state(State.READY)
    for _ in range(before):
        status.ejected("wrong weights", refused=False)
        status.joined()
    told = [status.call_failed("status 500", at, at) for at in (1.0, 2.0, 3.0)]
    assert told == [False, False, True]
    status.ejected("3 calls failed", refused=False)
    assert (status.ejections, status.failures) == (before + 1, STREAK * (before + 1))


@pytest.mark.parametrize(("refused", "most"), [(True, REFUSALS), (False, FRUITLESS)])
def test_a_server_is_barred_for_ejections_without_a_completion_between(refused, most):
    status = in_state(State.READY)
    for _ in range(3 * FRUITLESS):  # a completion lies between
        status.ejected("broken", refused=refused)
        assert status.state is State.AWAY and status.reason == "broken" and status.check_soon.is_set() == refused
        status.joined()
        status.completed()
    for times in range(1, most + 1):
        status.ejected("broken", refused=refused)
        assert (status.state is State.BARRED) == (times == most) and status.may_return == (times < most)
        if times < most:
            status.joined()
            status.produced()  # tokens alone do not count
    assert status.reason == f"broken ({most} times in a row, without a completion in between)"


def test_a_server_out_of_service_is_asked_more_and_more_rarely():
    status = in_state(State.READY)
    assert status.check_seconds(5.0) == 5.0
    status.ejected("broken", refused=False)
    waits = []
    for _ in range(6):
        waits.append(status.check_seconds(5.0))
        status.failed_to_return("broken", refused=False)  # as often as it is asked
        assert status.check_seconds(5.0) == waits[-1]
        status.failed_to_load()
    assert waits == [5.0, 10.0, 20.0, 40.0, LONGEST_WAIT, LONGEST_WAIT]
    status.joined()
    assert status.check_seconds(5.0) == 5.0 and not status.works
    status.completed()
    assert status.works


async def test_a_break_lasts_through_a_suspicion_and_no_longer():
    over, waits, status = [], [], in_state(State.READY)

    def ask():
        return status.asked_for_break("busy", lambda times: waits.append(times) or 0.0, lambda: over.append(1))

    assert ask() and not ask() and status.state is State.BUSY
    status.suspected("odd")
    status.passed_check()
    assert status.state is State.BUSY, "its break is not over"
    status.suspected("odd")
    await asyncio.sleep(0.01)
    assert over == [1] and status.state is State.SUSPECT, "it has not passed a check"
    status.passed_check()
    assert status.state is State.READY and not status.works
    assert ask() and waits == [1, 2]
    status.ejected("broken", refused=False)
    await asyncio.sleep(0.01)
    assert over == [1] and status.state is State.AWAY, "an ejection ends the break"
    status.joined()
    status.produced()
    assert ask() and waits == [1, 2, 1]
