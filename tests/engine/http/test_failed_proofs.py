"""One of several servers does not compute with the weights that it was given: it is out of service until it does,
others go on, and nothing that it sampled counts."""

import asyncio

import numpy as np
import pytest

from proxima.data import UserError
from proxima.engine.http.weight_probe import WeightProbe
from proxima.engine.local import collect
from tests.engine.http.plain_dialect import engine_over, fakes, requests, update
from tests.engine.http.test_faulty_servers import WEIGHTS, check, until
from tests.engine.http.test_pauses import IN_PLACE, begun, go_on


def test_it_is_ejected_with_its_reason_and_returns_once_it_has_the_weights(tmp_path):
    asked = requests(6, 2)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[1].ignores_weights = True
        await engine.publish(update(2, WEIGHTS[2]))
        out, calls = await engine.health(), servers[1].calls["/generate"]
        given = await collect(engine, asked)
        assert servers[1].calls["/generate"] == calls
        servers[1].ignores_weights = False
        await until(lambda: engine._pool.counts["returned"] == 1)
        return out, given, await collect(engine, asked)

    with fakes(2) as servers, engine_over(servers, tmp_path, max_running=2) as engine:
        out, first, second = asyncio.run(go(engine, servers))
        assert servers[1].weights == WEIGHTS[2]
    assert [server["in_service"] for server in out.detail["servers"]] == [True, False]
    assert out.detail["sync"]["replicas"] == 1 and out.version == 2
    (line,) = out.detail["events"]
    assert line.startswith(f"engine: {servers[1].url} is out of service: new weights: ") and "nats off" in line
    for given in (first, second):
        check(asked, given)
        assert {v for server in given for v in server.policy_version.tolist()} == {2}


def test_it_is_given_weights_again_ever_more_rarely_and_serves_nothing(tmp_path):
    async def go(engine, servers):
        replica = engine._pool.replicas[1]
        await engine.publish(update(1, WEIGHTS[1]))
        servers[1].ignores_weights = True
        await engine.publish(update(2, WEIGHTS[2]))
        await until(lambda: replica.failed_returns == 5)
        assert not replica.in_service and servers[1].calls["/weights"] == 2 + 5
        assert engine._pool.counts["ejected"] == 1 and engine._pool.counts["returned"] == 0
        await engine.publish(update(3, WEIGHTS[0]))
        return await engine.health()

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        health = asyncio.run(go(engine, servers))
        assert engine._keeper.pause_of(engine._pool.replicas[1]) >= 2**5 * engine.spec.health_seconds
    assert len(health.detail["events"]) == 1  # told once, however often it fails


def test_a_server_that_was_started_again_and_fails_its_proof_is_reported(tmp_path):
    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[1].ignores_weights = True
        servers[1].restart()
        await until(lambda: engine._pool.replicas[1].failed_returns >= 2)
        return await engine.health()

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        first, second = asyncio.run(go(engine, servers)).detail["events"]
    assert "is out of service" in first and "nats off" not in first
    assert f"{servers[1].url} stays out of service: " in second and "nats off" in second


def test_the_run_ends_when_all_servers_fail(tmp_path):
    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        for server in servers:
            server.ignores_weights = True
        await engine.publish(update(2, WEIGHTS[2]))

    with (
        fakes(2) as servers,
        engine_over(servers, tmp_path) as engine,
        pytest.raises(UserError, match="computes with other weights"),
    ):
        asyncio.run(go(engine, servers))


def test_one_that_is_away_is_waited_for_when_all_others_fail(tmp_path):
    asked = requests(4, 2)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[0].die()
        await until(lambda: engine._pool.counts["ejected"] == 1)
        servers[1].ignores_weights = True
        publishing = asyncio.create_task(engine.publish(update(2, WEIGHTS[2])))
        await until(lambda: engine._pool.counts["ejected"] == 2)
        assert not publishing.done()
        servers[0].come_back()
        await publishing
        return await collect(engine, asked)

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        given = asyncio.run(go(engine, servers))
        assert [completion.in_service for completion in engine._pool.replicas] == [True, False]
    check(asked, given)
    assert {v for completion in given for v in completion.policy_version.tolist()} == {2}


def test_the_run_ends_when_nobody_returns(tmp_path):
    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[0].die()
        await until(lambda: engine._pool.counts["ejected"] == 1)
        servers[1].ignores_weights = True
        await engine.publish(update(2, WEIGHTS[2]))

    with (
        fakes(2) as servers,
        engine_over(servers, tmp_path, away_seconds=1.0) as engine,
        pytest.raises(UserError, match=f"all 2 servers are out of service: .*{servers[1].url}: .*nats"),
    ):
        asyncio.run(go(engine, servers))


def test_the_run_ends_at_its_first_sync_whoever_fails(tmp_path):
    """That is how the server was started: the next sync would be no better."""
    with fakes(3) as servers, engine_over(servers, tmp_path) as engine:
        servers[2].ignores_weights = True
        with pytest.raises(UserError, match=f"{servers[2].url} computes with other weights"):
            asyncio.run(engine.publish(update(1, WEIGHTS[1])))


def test_what_it_continues_with_before_it_is_found_does_not_count(tmp_path):
    """Completions that it held end after it says that it has the new weights, and before the probe is answered."""
    asked = requests(6, 2)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        task = await begun(engine, servers, asked)
        bad, loop, held = servers[1], servers[1].loop._loop, asyncio.Event()
        assert bad.running
        scored = bad._scored

        async def later(body):
            await held.wait()
            return await scored(body)

        bad.ignores_weights, bad._scored = True, later
        publishing = asyncio.create_task(engine.publish(update(2, WEIGHTS[2])))
        calls = bad.calls["/score"]
        await until(lambda: bad.calls["/score"] > calls)
        go_on(servers)
        await until(lambda: not bad.running)
        assert not task.done()
        loop.call_soon_threadsafe(held.set)
        await publishing
        return await task, await engine.health()

    with fakes(2, facts=IN_PLACE) as servers, engine_over(servers, tmp_path, health_seconds=30.0) as engine:
        given, health = asyncio.run(go(engine, servers))
    check(asked, given)  # by the weights that each token says
    assert health.detail["replicas"]["tokens_lost"] > 0 and health.detail["replicas"]["ready"] == 1


def test_a_server_that_did_not_follow_is_compared_with_what_it_was_before(tmp_path):
    draws, probe = np.random.default_rng(0), WeightProbe(np.arange(200))
    start, step = draws.normal(size=192), draws.normal(size=192) * 0.1
    assert probe.check_movement("a", 0, start, start) == {}
    for version in (1, 1, 2):
        with pytest.raises(UserError, match="moved 0.00 times as far"):
            probe.check_movement("a", version, start + version * step, start)
    assert probe.check_movement("a", 2, start + 2 * step, start + 2 * step)["slope"] == pytest.approx(1)
