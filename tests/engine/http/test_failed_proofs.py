"""One of several servers does not compute with the weights that it was given: it is out of service until it does,
others go on, and nothing that it sampled counts."""

import asyncio

import pytest

from proxima.data import UserError
from proxima.engine.local.local_engine import collect
from tests.engine.http.plain_servers import (
    IN_PLACE,
    LONG,
    WEIGHTS,
    begun,
    check,
    go_on,
    hold_scores,
    replicas,
    requests,
    update,
)
from tests.processes import until


@pytest.mark.slow
async def test_it_is_ejected_with_its_reason_and_returns_once_it_has_the_weights(fleet):
    asked = requests(6, 2)
    engine, servers = fleet(2, max_running=2, published=True)
    servers[1].ignores_weights = True
    await engine.publish(update(2))
    health, calls = await engine.health(), servers[1].calls["/generate"]
    assert replicas(engine) == [True, False]
    assert health.detail["sync"]["replicas"] == 1 and health.version == 2
    (line,) = health.detail["events"]
    assert line.startswith(f"engine: {servers[1].url} is out of service: new weights: ") and "nats off" in line
    check(asked, await collect(engine, asked), 2)
    assert servers[1].calls["/generate"] == calls
    servers[1].ignores_weights = False
    await until(lambda: engine._pool.counts["returned"] == 1)
    check(asked, await collect(engine, asked), 2)
    assert servers[1].weights == WEIGHTS[2]


@pytest.mark.slow
async def test_it_is_given_weights_again_ever_more_rarely_and_serves_nothing(fleet):
    engine, servers = fleet(2, health_seconds=0.01)
    replica = engine._pool.replicas[1]
    await engine.publish(update(1))
    servers[1].ignores_weights = True
    await engine.publish(update(2))
    await until(lambda: replica.status.ejections >= 5)
    assert 2 + 4 <= servers[1].calls["/weights"] <= 2 + replica.status.ejections  # the last may still be going on
    assert replica.status.check_seconds(engine.spec.health_seconds) >= 2**4 * engine.spec.health_seconds
    assert not replica.in_service and engine._pool.counts["ejected"] == 1 and engine._pool.counts["returned"] == 0
    await engine.publish(update(3, WEIGHTS[0]))
    assert len((await engine.health()).detail["events"]) == 1  # told once, however often it fails


@pytest.mark.slow
async def test_a_server_that_was_started_again_and_fails_its_proof_is_reported(fleet):
    engine, servers = fleet(2, published=True)
    servers[1].ignores_weights = True
    servers[1].restart()
    await until(lambda: engine._pool.replicas[1].status.ejections >= 3)
    first, second = (await engine.health()).detail["events"]
    assert "is out of service" in first and "nats off" not in first
    assert f"{servers[1].url} stays out of service: " in second and "nats off" in second


async def test_the_run_ends_when_all_servers_fail(fleet):
    engine, servers = fleet(2, published=True)
    for server in servers:
        server.ignores_weights = True
    with pytest.raises(UserError, match="computes with other weights"):
        await engine.publish(update(2))


@pytest.mark.slow
@pytest.mark.parametrize("returns", [True, False])
async def test_one_that_is_away_is_waited_for_when_all_others_fail(returns, fleet):
    """And the run ends when it does not return, as one does not that fails to load these very weights."""
    asked = requests(4, 2)
    engine, servers = fleet(2, away_seconds=LONG if returns else 0.2, published=True)
    if returns:
        servers[0].die()
        await until(lambda: engine._pool.counts["ejected"] == 1)
    else:
        servers[0].fail("/weights")
    servers[1].ignores_weights = True
    publishing = asyncio.create_task(engine.publish(update(2)))
    await until(lambda: engine._pool.counts["ejected"] == 2)
    if not returns:
        with pytest.raises(UserError, match=f"all 2 servers are out of service: .*{servers[1].url}: .*nats"):
            await publishing
        return
    assert not publishing.done()
    servers[0].come_back()
    await publishing
    check(asked, await collect(engine, asked), 2)
    assert replicas(engine) == [True, False]


async def test_the_run_ends_at_its_first_sync_whoever_fails(fleet):
    """That is how the server was started: the next sync would be no better. It gets no work."""
    engine, servers = fleet(3, health_seconds=LONG)
    servers[2].ignores_weights = True
    with pytest.raises(UserError, match=f"{servers[2].url} computes with other weights"):
        await engine.publish(update(1))
    await engine.resume()
    assert replicas(engine) == [True, True, False]


@pytest.mark.slow
async def test_what_it_continues_with_before_it_is_found_does_not_count(fleet):
    """Completions that it held end after it says that it has the new weights, and before the probe is answered."""
    asked = requests(6, 2)
    engine, servers = fleet(2, facts=IN_PLACE, health_seconds=LONG, published=True)
    task = await begun(engine, servers, asked)
    bad = servers[1]
    assert bad.running
    release, calls, bad.ignores_weights = hold_scores(bad), bad.calls["/score"], True
    publishing = asyncio.create_task(engine.publish(update(2)))
    await until(lambda: bad.calls["/score"] > calls)
    go_on(servers)
    await until(lambda: not bad.running)
    assert not task.done()
    release()
    await publishing
    check(asked, await task)  # by the weights that each token says
    counts = (await engine.health()).detail["replicas"]
    assert counts["tokens_lost"] > 0 and counts["ready"] == 1
