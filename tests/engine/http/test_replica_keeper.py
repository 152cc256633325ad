"""What a health check that fails says of a server, by what came from it meanwhile; and which one is given work."""

import asyncio
import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from proxima.engine.http.client import Address, RefusedError, ServerError
from proxima.engine.http.replica import Replica, State
from proxima.engine.http.replica_keeper import ReplicaKeeper
from proxima.engine.http.replica_pool import STREAK, ReplicaPool
from tests.engine.http.plain_dialect import Plain, PlainDialect

BUSY = ServerError("http://h", "/load", "come again", status=429)
FAILED = ServerError("http://h", "/load", "status 500", status=500)
REFUSED = RefusedError("refused with status 401")


def checked(error, tokens):
    """The errors that eject a server whose health check ends so, while so many tokens come."""
    ejections = []

    async def health():
        replica.received += tokens
        raise error

    replica = SimpleNamespace(received=5, health=health, proof=SimpleNamespace(label=None, unverified=tuple))
    keeper = ReplicaKeeper.__new__(ReplicaKeeper)
    keeper.pool = SimpleNamespace(loading=False, eject=lambda replica, error: ejections.append(error))
    asyncio.run(keeper._check(replica))
    return ejections


@pytest.mark.parametrize(("error", "ejected"), [(REFUSED, True), (FAILED, True), (BUSY, False)])
def test_one_that_produces_tokens_is_only_slow_and_one_that_is_busy_is_left_alone(error, ejected):
    assert checked(error, tokens=3) == []
    assert checked(error, tokens=0) == ([error] if ejected else [])


@pytest.mark.parametrize(("error", "counts"), [(FAILED, True), (BUSY, False), (REFUSED, False)])
def test_only_failures_make_a_streak_that_ejects(error, counts):
    """A busy answer to one of the requests that were running beside those that failed ejects nobody again."""
    ejections, suspects = [], []
    pool = SimpleNamespace(
        eject=lambda replica, error: ejections.append(error),
        suspect=lambda replica, reason: suspects.append(reason),
        _rest=lambda replica, error: None,
    )
    replica = SimpleNamespace(streak=STREAK - 2, url="http://h", state=State.READY)
    for _ in range(2):
        ReplicaPool._note_failure(pool, replica, error)
    assert suspects == ["status 500"] * counts and replica.streak == STREAK - 2 + 2 * counts
    assert [error.reason for error in ejections] == (
        ["3 calls in a row failed, the last one with: status 500"]
        if counts
        else [REFUSED.reason] * 2 * (error is REFUSED)
    )


def test_only_a_ready_replica_that_neither_rests_nor_pauses_is_given_work():
    replica = Replica(Address("http://127.0.0.1:1"), PlainDialect(), Plain(), "tag")
    for state, pause, rest in itertools.product(State, ("none", "held", "stopped", "asleep"), (None, Mock())):
        replica.state, replica.pause, replica.rest = state, pause, rest
        assert replica.has_room == (state is State.READY and pause == "none" and rest is None)
        assert replica.in_service == (state in (State.READY, State.SUSPECT))
