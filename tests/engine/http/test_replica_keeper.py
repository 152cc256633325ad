"""What a health check that fails says of a server, by what came from it meanwhile."""

import asyncio
from collections import Counter
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from proxima.engine.http.client import RefusedError, ServerError
from proxima.engine.http.replica_keeper import ReplicaKeeper
from proxima.engine.http.replica_pool import STREAK, ReplicaPool
from proxima.engine.http.replica_states import Event

BUSY = ServerError("http://h", "/load", "come again", status=429)
FAILED = ServerError("http://h", "/load", "status 500", status=500)
REFUSED = RefusedError("refused with status 401")


def checked(error, tokens):
    """The events of a health check that ends so, while so many tokens come; and whether the server is overloaded."""
    moves, overloads = [], []

    async def health():
        replica.received += tokens
        raise error

    replica = SimpleNamespace(
        received=5,
        health=health,
        proof=SimpleNamespace(label=None, unverified=tuple),
        overloaded=lambda now, reason: overloads.append(reason),
    )
    keeper = ReplicaKeeper.__new__(ReplicaKeeper)
    keeper.pool = pool = SimpleNamespace(loading=False, move=lambda replica, event, reason: moves.append(event))
    pool.eject = partial(ReplicaPool.eject, pool)
    asyncio.run(keeper._check(replica))
    return moves, overloads


@pytest.mark.parametrize(("error", "event"), [(REFUSED, Event.REFUSED), (FAILED, Event.EJECTED)])
def test_one_that_produces_tokens_is_only_slow(error, event):
    assert checked(error, tokens=3) == ([], [])
    assert checked(error, tokens=0) == ([event], [])


@pytest.mark.parametrize("tokens", [0, 3])
def test_one_that_is_busy_is_left_alone(tokens):
    assert checked(BUSY, tokens) == ([], ["come again"])


@pytest.mark.parametrize(("error", "ejected"), [(FAILED, True), (BUSY, False), (REFUSED, False)])
def test_only_a_failure_of_a_completion_ends_a_streak(error, ejected):
    """A busy answer to one of the requests that were running beside those that failed ejects nobody again."""
    moves = []
    job = SimpleNamespace(tried=set(), failures=0, discard=lambda: 0, wanted=False)
    pool = SimpleNamespace(
        repeatable=True,
        counts=Counter(),
        _note_failure=lambda *_: None,
        move=lambda replica, event, reason: moves.append(event),
    )
    ReplicaPool._failed(pool, job, Mock(streak=STREAK), error, 0.0)
    assert moves == ([Event.EJECTED] if ejected else [])
    assert pool.counts["failed"] == job.failures == int(ejected)
