"""The states of a replica, and the table of their transitions.

A replica is in service (`IN_SERVICE`) or out of it. Two other properties are not states: the pause mode last set
(`Replica.pause`), which the engine decides for all replicas, and its weights (`version_proof.py`).
"""

from enum import Enum


class State(Enum):
    """The state of a replica: whether it is given work and, if not, what it is waiting for."""

    READY = "is given work"
    BUSY = "has too much to do and is left alone for a while"
    SUSPECT = "a call failed; gets no work until a health check passes"
    BUSY_SUSPECT = "both: after the break it still needs a health check"
    AWAY = "out of service, as at first; asked now and then whether it is well"
    REFUSING = "out of service because it refused our key; asked once more"
    LOCKED = "out of service; it refused our key again when it was asked to return"
    BARRED = "out of service for good: ejected again and again, and completed nothing between"


class Event(Enum):
    """An event that may change the state of a replica."""

    FAILED = "a completion or a score failed"
    OVERLOADED = "it answered 429 or 503"
    RESTED = "the break of a busy server is over"
    CHECKED = "a health check passed"
    EJECTED = "it does not answer, or is not what it should be"
    REFUSED = "it answered 401 or 403"
    HOPELESS = "it was ejected too often without a completion between"
    RETURNED = "it answers everything as the others do and has the newest weights"
    STILL_AWAY = "it was asked to return and is not well"
    STILL_REFUSED = "it was asked to return and refused our key"


class Action(Enum):
    """The pool's action at a transition."""

    NOTHING = "nothing"
    DISPATCH = "give it work"
    REST = "start its break"
    CHECK = "have its health checked now"
    LEAVE = "end what it runs, move what waits for it, tell the user"
    LEAVE_AND_ASK = "the same, and ask it at once whether it takes our key"
    WELCOME = "tell the user, and give it work"


IN_SERVICE = frozenset({State.READY, State.BUSY, State.SUSPECT, State.BUSY_SUSPECT})
OUT_OF_SERVICE = frozenset({State.AWAY, State.REFUSING, State.LOCKED, State.BARRED})
MAY_RETURN = OUT_OF_SERVICE - {State.BARRED}
LATE = (Event.FAILED, Event.OVERLOADED, Event.EJECTED, Event.REFUSED)  # events of calls that ended after an ejection

# Other pairs can't occur; `tests/engine/http/test_replica_states.py` lists them with the reasons.
TRANSITIONS: dict[tuple[State, Event], tuple[State, Action]] = {
    (State.READY, Event.FAILED): (State.SUSPECT, Action.CHECK),
    (State.READY, Event.OVERLOADED): (State.BUSY, Action.REST),
    (State.READY, Event.CHECKED): (State.READY, Action.DISPATCH),
    (State.BUSY, Event.FAILED): (State.BUSY_SUSPECT, Action.CHECK),
    (State.BUSY, Event.OVERLOADED): (State.BUSY, Action.NOTHING),
    (State.BUSY, Event.RESTED): (State.READY, Action.DISPATCH),
    (State.BUSY, Event.CHECKED): (State.BUSY, Action.NOTHING),
    (State.SUSPECT, Event.FAILED): (State.SUSPECT, Action.CHECK),
    (State.SUSPECT, Event.OVERLOADED): (State.BUSY_SUSPECT, Action.REST),
    (State.SUSPECT, Event.CHECKED): (State.READY, Action.DISPATCH),
    (State.BUSY_SUSPECT, Event.FAILED): (State.BUSY_SUSPECT, Action.CHECK),
    (State.BUSY_SUSPECT, Event.OVERLOADED): (State.BUSY_SUSPECT, Action.NOTHING),
    (State.BUSY_SUSPECT, Event.RESTED): (State.SUSPECT, Action.NOTHING),
    (State.BUSY_SUSPECT, Event.CHECKED): (State.BUSY, Action.NOTHING),
    **{(state, Event.EJECTED): (State.AWAY, Action.LEAVE) for state in IN_SERVICE},
    **{(state, Event.REFUSED): (State.REFUSING, Action.LEAVE_AND_ASK) for state in IN_SERVICE},
    **{(state, Event.HOPELESS): (State.BARRED, Action.NOTHING) for state in (State.AWAY, State.REFUSING)},
    **{(state, Event.RETURNED): (State.READY, Action.WELCOME) for state in MAY_RETURN},
    **{(state, Event.STILL_AWAY): (State.AWAY, Action.NOTHING) for state in MAY_RETURN},
    **{(state, Event.STILL_REFUSED): (State.LOCKED, Action.NOTHING) for state in MAY_RETURN},
    **{(state, event): (state, Action.NOTHING) for state in OUT_OF_SERVICE for event in LATE},
}
