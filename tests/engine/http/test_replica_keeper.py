"""What a health check that fails says of a server, by what came from it meanwhile; and which one is given work."""

import asyncio
import itertools
from types import SimpleNamespace

import pytest

from proxima.engine.http.client import Address, RefusedError
from proxima.engine.http.replica import HIGHEST_LIMIT, Replica
from proxima.engine.http.replica_keeper import ReplicaKeeper
from proxima.engine.http.replica_pool import ReplicaPool
from proxima.engine.http.replica_state import STREAK, State
from proxima.engine.http.weights.sync import WeightSync
from proxima.engine.protocol import ServerError
from tests.engine.http.plain_servers import Plain, PlainDialect

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
def test_one_that_produces_tokens_is_slow_and_a_busy_one_is_left_alone(error, ejected):
    assert checked(error, tokens=3) == []
    assert checked(error, tokens=0) == ([error] if ejected else [])


@pytest.mark.parametrize(("error", "counts"), [(FAILED, True), (BUSY, False), (REFUSED, False)])
def test_only_failures_make_a_streak_that_ejects(error, counts):
    """A busy answer to one of the requests that were running beside those that failed ejects nobody again."""
    ejections = []
    pool = SimpleNamespace(
        eject=lambda replica, error, what="": ejections.append(what + error.reason), _rest=lambda replica, error: None
    )
    replica = some_replica()
    replica.status.joined()
    replica.status.failures = STREAK - 2

    async def two_failures():
        for _ in range(2):
            ReplicaPool._note_failure(pool, replica, error, asyncio.get_running_loop().time())

    asyncio.run(two_failures())
    assert (replica.status.state, replica.status.failures) == (
        (State.SUSPECT, STREAK - 1) if counts else (State.READY, STREAK - 2)
    )
    assert ejections == (
        ["3 calls in a row failed, the last one with: status 500"]
        if counts
        else [REFUSED.reason] * 2 * (error is REFUSED)
    )


def some_replica():
    return Replica(Address("http://127.0.0.1:1"), PlainDialect(), Plain(), "tag")


def test_a_server_that_hangs_is_asked_to_pause_once():
    """Else a push that is cancelled would wait for two deadlines."""
    asked, sync = [], WeightSync.__new__(WeightSync)
    sync._proven = set()

    async def pause(*_):
        asked.append("pause")
        raise FAILED

    replica = SimpleNamespace(url="http://h", client=None, facts=None, dialect=SimpleNamespace(pause=pause))
    asyncio.run(sync._undo(replica, None))
    assert asked == ["pause"]


@pytest.mark.parametrize("produces", ["received", "successes", None])
def test_a_run_whose_servers_produce_something_goes_on_however_they_fail(produces):
    replica, errors, now = some_replica(), [], 0.0
    replica.status.state = State.SUSPECT
    keeper = ReplicaKeeper.__new__(ReplicaKeeper)
    keeper._idle_since, keeper._produced, keeper.servers = None, 0, None
    keeper._awaiting, keeper._loading, keeper._stopping = set(), {}, False
    keeper.pool = SimpleNamespace(
        replicas=[replica],
        known=[replica],
        serving=[replica],
        jobs=[object()],
        scores=0,
        asleep=False,
        sends=True,
        spec=Plain(away_seconds=600.0),
        give_up=errors.append,
    )

    async def watch():
        nonlocal now
        asyncio.get_running_loop().time = lambda: now
        for now in (0.0, 300.0, 599.0, 600.0):
            if produces is not None:
                setattr(replica, produces, getattr(replica, produces) + 1)
            keeper._fail_if_none_works()
            assert len(errors) == (produces is None and now == 600.0)

    asyncio.run(watch())


def test_only_a_ready_replica_that_does_not_pause_is_given_work():
    replica = some_replica()
    for state, pause in itertools.product(State, ("none", "held", "stopped", "asleep")):
        replica.status.state, replica.pause = state, pause
        assert replica.has_room == replica.has_room_to_score == (state is State.READY and pause == "none")
        assert replica.in_service == (state in (State.READY, State.SUSPECT, State.BUSY))


def test_an_automatic_limit_is_what_the_server_runs_without_queueing():
    replica = some_replica()
    replica.running = dict.fromkeys(range(100))
    for most in (128, 64, 60, 60):  # a queue that lasts is not taken off again and again
        replica.adapt(40)
        assert replica.limit == most
    for most in (30, 15, 7, 3, 1, 1):  # most of those that wait are of others
        replica.adapt(150)
        assert replica.limit == most
    replica.adapt(0, queued=True)  # it has room
    assert replica.limit == 1
    for most in (2, 4, 8):
        replica.assigned = replica.limit
        replica.adapt(0)  # nothing waits for more
        replica.adapt(0, queued=True)
        assert replica.limit == most
    replica.limit = replica.assigned = HIGHEST_LIMIT - 1
    replica.adapt(0, queued=True)
    assert replica.limit == HIGHEST_LIMIT


@pytest.mark.parametrize(("most", "pause"), [(4, "none"), (0, "held")])
def test_a_limit_that_is_set_stays_and_any_in_a_pause(most, pause):
    replica = Replica(Address("http://127.0.0.1:1"), PlainDialect(), Plain(max_running=most), "tag")
    replica.pause, limit = pause, replica.limit
    replica.running, replica.assigned = dict.fromkeys(range(limit)), limit
    replica.adapt(3)
    replica.adapt(0, queued=True)
    assert replica.limit == limit


def test_an_automatic_limit_halves_with_each_break_of_a_busy_server():
    replica = some_replica()
    replica.status.joined()
    replica.limit, replica.running = 8, dict.fromkeys(range(8))
    pool = ReplicaPool([replica], Plain())

    async def two_busy_answers():
        for _ in range(2):
            pool._rest(replica, BUSY)
        assert replica.limit == 4 and replica.status.breaks == 1
        replica.status._end_break(pool.dispatch)
        pool._rest(replica, BUSY)
        assert replica.limit == 4  # that many of the eight it may run

    asyncio.run(two_busy_answers())


async def test_loading_that_was_interrupted_may_be_interrupted_again():
    """While it is on its way out: the trainer wants the server's devices, or newer weights come."""

    async def asleep():
        pass

    keeper = ReplicaKeeper.__new__(ReplicaKeeper)
    keeper.pool = SimpleNamespace(asleep=False, sleep=asleep)
    keeper._interrupted, keeper._syncing, keeper._goes_first = set(), asyncio.Lock(), False
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(None) as loading:
            keeper._loading = {"replica": loading}
            async with keeper._before_returns():
                await keeper.sleep()
            await asyncio.sleep(100)
    await keeper.sleep()
    keeper._interrupted.clear()
    async with keeper._before_returns():
        pass
    assert loading.expired()


@pytest.mark.parametrize("line", [None, "the servers share a folder"])
def test_the_first_weights_are_checked_with_the_servers_that_were_there_and_with_no_late_one(line):
    """A server that came late must not end the run, and later weights are not checked again."""
    early, late, away = (object() for _ in range(3))
    asked, prepared = [], []

    class Sync:
        async def check(self, replicas, update):
            asked.append((replicas, update))
            return line

        async def prepare(self, update, label, dtype):
            prepared.append((update, label, dtype))
            return "staged"

        def label_of(self, run, number, version):
            return f"{run} {number} {version}"

    keeper = ReplicaKeeper.__new__(ReplicaKeeper)
    keeper.pool = SimpleNamespace(serving=[early, late], replicas=[early, late, away], events=["a word before"])
    keeper.sync, keeper.run, keeper._numbers = Sync(), "run", itertools.count(1)
    keeper.facts, keeper._late, keeper._newest = SimpleNamespace(dtype="float32"), {late}, None
    first, second = SimpleNamespace(version=3), SimpleNamespace(version=4)
    assert asyncio.run(keeper._prepare(first)) == "staged"
    assert asked == [([early], first)]
    assert keeper.pool.events == ["a word before"] + [line] * (line is not None)
    keeper._newest = "run 1 3"
    asyncio.run(keeper._prepare(second))
    assert len(asked) == 1
    assert prepared == [(first, "run 1 3", "float32"), (second, "run 2 4", "float32")]
    assert 0 <= keeper._prepare_seconds < 600
