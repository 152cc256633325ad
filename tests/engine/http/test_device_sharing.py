"""Servers that leave their devices to the trainer by turns: what they are told, and what becomes of one that fails."""

import asyncio
from dataclasses import replace

import pytest

from proxima.data import UserError
from proxima.engine.http.dialect import ServerFacts
from proxima.engine.http.server_checks import check_facts
from proxima.engine.http.vllm import Vllm, VllmDialect
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import EngineRequirements
from tests.engine.helpers import unloaded
from tests.engine.http.fake_vllm import FakeVllm
from tests.engine.http.plain_servers import LONG, begun, check, go_on, hold_scores, replicas, requests, update
from tests.processes import until

SLEEPS = {"sleeps": True}


def spoken(fake):
    """The control calls, with their query."""
    names = ("/sleep", "/wake_up", "/pause", "/resume", "/is_sleeping")
    return [(path, query) for path, query in fake.calls if path in names]


async def test_vllm_gives_its_memory_up_and_takes_the_weights_first():
    fake, dialect = FakeVllm(sleeps=True), VllmDialect()
    client = fake.client()
    facts = await dialect.probe(client)
    fake.calls.clear()
    await dialect.sleep(client, facts)
    assert facts.sleeps and fake.asleep
    await dialect.wake(client, facts)
    assert fake.asleep == {"kv_cache"} and fake.paused
    await dialect.wake_cache(client, facts)
    assert spoken(fake) == [
        ("/sleep", {"level": "1", "mode": "abort"}),
        ("/wake_up", {"tags": "weights"}),
        ("/wake_up", {"tags": "kv_cache"}),
        ("/pause", {"mode": "abort", "clear_cache": "false"}),
    ]
    assert not fake.asleep and fake.paused  # vLLM samples when it wakes


async def test_a_server_that_was_left_asleep_is_woken_to_be_asked():
    fake = FakeVllm(sleeps=True)
    fake.asleep, fake.paused = {"kv_cache"}, True  # half-way
    facts = await VllmDialect().probe(fake.client())
    assert facts.sleeps and not fake.asleep and not fake.paused


async def test_a_server_that_runs_is_not_told_to_wake():
    fake = FakeVllm()
    assert not (await VllmDialect().probe(fake.client())).sleeps
    assert spoken(fake) == [("/is_sleeping", {})]


def test_a_server_without_sleep_mode_is_refused_where_devices_are_shared():
    facts = ServerFacts(server="vllm 1", model="m", log_probs="processed")
    needs = EngineRequirements(model=unloaded(), sleeps=True)
    with pytest.raises(UserError, match=r"can't release its devices.*--enable-sleep-mode"):
        check_facts(Vllm(), facts, needs, "http://x")


@pytest.mark.slow
async def test_nothing_runs_between_sleep_and_resume(fleet):
    asked = requests(3, 2)
    engine, servers = fleet(2, facts=SLEEPS)
    assert engine.capabilities.sleeps
    await engine.publish(update(1))
    task = await begun(engine, servers, asked)
    await engine.pause()
    await engine.sleep()  # the servers assert that they hold nothing
    assert all(server.asleep for server in servers)
    go_on(servers)
    calls = [server.calls["/load"] for server in servers]
    await until(lambda: all(server.calls["/load"] > n + 2 for server, n in zip(servers, calls, strict=True)))
    assert all(server.asleep and not server.running for server in servers) and not task.done()  # they wake nobody
    await engine.wake()
    assert all(server.paused and not server.asleep for server in servers)
    await engine.publish(update(2))
    await engine.resume()
    check(asked, await task)


@pytest.mark.slow
async def test_a_server_that_comes_back_during_an_update_waits_for_its_end(fleet):
    engine, servers = fleet(2, facts=SLEEPS, published=True)
    servers[0].fail("/load")  # its health check
    await until(lambda: engine._pool.counts["ejected"])
    release, calls = hold_scores(servers[0]), servers[0].calls["/score"]
    servers[0].restart()
    servers[0].failing.clear()
    await until(lambda: servers[0].calls["/score"] > calls)  # it is being proven
    await engine.pause()
    await engine.sleep()
    release()
    await until(lambda: servers[0].asleep)
    task = asyncio.create_task(collect(engine, requests(4, 2)))
    await asyncio.sleep(0.05)
    assert replicas(engine) == [False, True]
    await engine.wake()
    await engine.resume()
    check(requests(4, 2), await task)
    await until(lambda: replicas(engine) == [True, True])
    assert not any(server.asleep for server in servers)


@pytest.mark.slow
async def test_a_long_update_is_no_absence_of_the_servers(fleet):
    engine, (server,) = fleet(facts=SLEEPS, away_seconds=0.05, published=True)
    server.fail("/sleep")
    await engine.pause()
    await engine.sleep()
    task = asyncio.create_task(collect(engine, requests(2, 2)))
    await asyncio.sleep(0.2)  # longer than `away_seconds`
    assert not task.done()
    server.failing.clear()
    engine._pool.spec = replace(engine.spec, away_seconds=LONG)  # until it is back
    await engine.wake()
    await engine.resume()
    check(requests(2, 2), await task)


async def test_a_server_that_returns_while_the_pause_ends_samples(fleet):
    engine, (server,) = fleet(facts=SLEEPS, published=True)
    pool, called, paused = engine._pool, server.called, []

    async def call(client, name):
        await called(client, name)
        paused.append(name == "/pause")
        if paused[-1] and sum(paused) == 2:  # the first is for the weights
            await pool.resume()

    server.fail("/sleep")
    await engine.pause()
    await engine.sleep()
    server.failing.clear()
    server.called = call
    await engine.wake()
    check(requests(2, 2), await collect(engine, requests(2, 2)))


async def test_a_server_that_returns_while_another_is_told_to_go_on_samples(fleet):
    engine, servers = fleet(2, facts=SLEEPS, published=True)
    called = servers[0].called

    async def call(client, name):
        await called(client, name)
        while name == "/resume" and replicas(engine) != [True, True]:
            await asyncio.sleep(0.001)

    servers[1].fail("/sleep")
    await engine.pause()
    await engine.sleep()
    servers[1].failing.clear()
    servers[0].called = call
    await engine.wake()
    await engine.resume()
    assert not any(server.paused for server in servers)


@pytest.mark.slow
@pytest.mark.parametrize("call", ["sleep", "wake"])
async def test_a_failing_server_is_ejected_and_returns_after_the_trainer(call, fleet):
    engine, servers = fleet(2, facts=SLEEPS, published=True)
    servers[0].fail(f"/{call}")
    await engine.pause()
    await engine.sleep()
    if call == "wake":
        await engine.wake()
    assert replicas(engine) == [False, True]
    assert "broken on purpose" in engine._pool.replicas[0].status.reason
    servers[0].failing.clear()
    if call == "sleep":
        probed = servers[0].calls["/facts"]
        await asyncio.sleep(0.1)
        assert servers[0].calls["/facts"] == probed  # it does not return while the trainer has the devices
        await engine.wake()
    await engine.publish(update(2))
    await engine.resume()
    await until(lambda: replicas(engine) == [True, True])
    check(requests(4, 2), await collect(engine, requests(4, 2)))
