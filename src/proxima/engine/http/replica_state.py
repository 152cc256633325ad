"""The state machine of a server: states in which it gets work, states in which it waits, and all transitions.

A server is ready until a call fails. It is then suspect until a health check passes; `STREAK` failed calls in a row
eject it, and so does a failed health check, a refused key, or the wrong weights. An ejected server is retried, more
rarely after each ejection. If ejections go on without a completion between, it is barred.

All this is based on one number, `failures`: consecutive failed calls without a completion or a score in between. An
ejection counts as `STREAK` of them, whatever caused it, and so does a failed return with new weights. A busy server
(429, 503) has not failed: it gets a break, a longer one each time.
"""

import asyncio
from collections.abc import Callable
from enum import Enum

STREAK = 3  # failed calls in a row that eject a server
# ejections in a row after which a server may not return
FRUITLESS = 10  # whatever the reasons
REFUSALS = 3  # if the last was for a refused key: a server may refuse completions and accept all else
LONGEST_WAIT = 60.0  # seconds before an ejected server is asked again


class State(Enum):
    """A server's state: it gets work, or waits for something.

    Two other properties are not states: the pause, which the engine decides for all servers (`Replica.pause`), and its
    weights (`version_proof.py`).
    """

    READY = "is given work"
    SUSPECT = "a call failed; gets no work until a health check passes"
    BUSY = "asked for a break; gets no work until it is over"
    AWAY = "out of service, or not yet in service; retried occasionally"
    LOCKED = "out of service: authentication failed twice; retried occasionally"
    BARRED = "out of service for good: ejected repeatedly without a completion in between, or removed from the run"


IN_SERVICE = frozenset({State.READY, State.SUSPECT, State.BUSY})
TRANSITIONS: dict[State, frozenset[State]] = {
    State.READY: frozenset({State.SUSPECT, State.BUSY, State.AWAY, State.BARRED}),
    State.SUSPECT: frozenset({State.READY, State.BUSY, State.AWAY, State.BARRED}),
    State.BUSY: frozenset({State.READY, State.SUSPECT, State.AWAY, State.BARRED}),
    State.AWAY: frozenset({State.READY, State.LOCKED, State.BARRED}),
    State.LOCKED: frozenset({State.READY, State.AWAY, State.BARRED}),
    State.BARRED: frozenset(),
}


class ReplicaState:
    """The state machine of one server. Every method is an event; one that does not apply in the current state is
    ignored.

    `state` and `reason`: why it is not in service, or its last failure since it has produced something.
    `failures`: see the module. `breaks`: in a row, without a token between.
    `check_soon`: set when it should be checked, or asked whether it can return, without waiting.
    """

    def __init__(self) -> None:
        self.state = State.AWAY
        self.reason = ""
        self.failures = 0
        self.breaks = 0
        self.check_soon = asyncio.Event()
        self._failed_at = 0.0  # when the last failure that counts was noticed
        self._break: asyncio.TimerHandle | None = None  # ends the break of a busy server, also while it is suspect

    def _enter(self, state: State) -> None:
        if state is not self.state and state not in TRANSITIONS[self.state]:
            raise RuntimeError(f"a server that is {self.state.name} can't become {state.name}")
        self.state = state

    # ---- what follows from it ----------------------------------------------------------------------------------------

    @property
    def in_service(self) -> bool:
        """True if it may be given work, perhaps after a break or a health check."""
        return self.state in IN_SERVICE

    @property
    def may_return(self) -> bool:
        """True if it is out of service, but not for good."""
        return self.state in (State.AWAY, State.LOCKED)

    @property
    def works(self) -> bool:
        """True if it is given work, and has completed something since it was ejected, and produced something since it
        was busy."""
        return self.state is State.READY and not self.breaks and not self.ejections

    @property
    def ejections(self) -> int:
        """Ejections and failed returns in a row, without a completion or a score between."""
        return self.failures // STREAK

    def check_seconds(self, seconds: float) -> float:
        """Seconds until the next health check, of which `seconds` lie between two of a server in service; they double
        with each ejection."""
        if self.in_service:
            return seconds
        doublings = min(max(0, self.ejections - 1), 10)
        return min(seconds * 2.0**doublings, LONGEST_WAIT)

    # ---- events in service -------------------------------------------------------------------------------------------

    def produced(self) -> None:
        """It has sent a token, or a score."""
        if self.in_service:  # else the reason says why it is not
            self.breaks = 0
            self.reason = ""

    def completed(self) -> None:
        """A completion or a score has arrived."""
        self.failures = 0
        self.produced()

    def call_failed(self, reason: str, started_at: float, now: float) -> bool:
        """A call that began at `started_at` failed. True: it is one of `STREAK` in a row, for which the server is to be
        ejected. Calls that fail together count once: the cause may have been momentary."""
        if not self.in_service:
            return False
        if started_at >= self._failed_at:
            self._failed_at = now
            if (self.failures + 1) % STREAK == 0:
                return True  # `ejected` counts it
            self.failures += 1
        self.suspected(reason)
        return False

    def suspected(self, reason: str) -> None:
        """It may have failed: it gets no work until a health check passes."""
        if self.in_service:
            self._enter(State.SUSPECT)
            self.reason = reason
            self.check_soon.set()

    def passed_check(self) -> None:
        """A health check passed."""
        if self.state is not State.SUSPECT:
            return
        if self._break is None:
            self._enter(State.READY)
        else:
            self._enter(State.BUSY)

    def asked_for_break(self, reason: str, seconds: Callable[[int], float], over: Callable[[], object]) -> bool:
        """It is too busy, and gets a break. False: it is out of service, or has one.

        Args:
            seconds: gives the length of the break from the number of breaks in a row, this one included.
            over: called at its end.
        """
        if not self.in_service or self._break is not None:
            return False
        self.breaks += 1
        self.reason = reason
        if self.state is State.READY:
            self._enter(State.BUSY)
        self._break = asyncio.get_running_loop().call_later(seconds(self.breaks), self._end_break, over)
        return True

    def _end_break(self, over: Callable[[], object]) -> None:
        self._break = None
        if self.state is State.BUSY:
            self._enter(State.READY)
        over()

    # ---- events out of service ---------------------------------------------------------------------------------------

    def ejected(self, reason: str, *, refused: bool) -> None:
        """It leaves service; `refused`: because it refused our key."""
        if not self.in_service:
            return
        self.failures = (self.ejections + 1) * STREAK
        most = REFUSALS if refused else FRUITLESS
        if self.ejections < most:
            self.reason = reason
            self._enter(State.AWAY)
        else:
            self.reason = f"{reason} ({self.ejections} times in a row, without a completion in between)"
            self._enter(State.BARRED)
        self._cancel_break()
        if refused:
            self.check_soon.set()  # whatever is between may have refused a single call; and it may be the last

    def removed(self, reason: str) -> None:
        """It is no longer a server of the run, whatever its state."""
        self.reason = reason
        self._enter(State.BARRED)
        self._cancel_break()

    def _cancel_break(self) -> None:
        if self._break is not None:
            self._break.cancel()
            self._break = None

    def failed_to_load(self) -> None:
        """New weights did not arrive while it was returning."""
        self.failures += STREAK

    def failed_to_return(self, reason: str, *, refused: bool) -> None:
        """A check showed that it can't return yet; `refused`: it refused our key."""
        state = State.LOCKED if refused else State.AWAY
        self._enter(state)
        self.reason = reason

    def joined(self) -> None:
        """It enters service, for the first time or again."""
        self._enter(State.READY)
