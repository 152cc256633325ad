"""Servers that leave their devices to the trainer by turns: what they are told, and what becomes of one that fails."""

import asyncio
import threading

import pytest

from proxima.data import UserError
from proxima.engine.http import ServerFacts
from proxima.engine.http.server_checks import check_facts
from proxima.engine.http.vllm import Vllm, VllmDialect
from proxima.engine.local import collect
from proxima.engine.protocol import EngineRequirements
from tests.engine.http.fake_vllm import FakeVllm
from tests.engine.http.plain_dialect import engine_over, fakes, requests, update
from tests.engine.http.test_faulty_servers import check, until

WEIGHTS = {1: 0.8, 2: 1.3}
SLEEPS = {"sleeps": True}


def spoken(fake):
    """The control calls, with their query."""
    names = ("/sleep", "/wake_up", "/pause", "/resume", "/is_sleeping")
    return [(path, query) for path, query in fake.calls if path in names]


def test_vllm_gives_its_memory_up_and_takes_the_weights_first():
    fake, dialect = FakeVllm(sleeps=True), VllmDialect()

    async def go():
        client = fake.client()
        facts = await dialect.probe(client)
        fake.calls.clear()
        await dialect.sleep(client, facts)
        assert fake.asleep
        await dialect.wake(client, facts)
        return facts

    facts = asyncio.run(go())
    assert facts.sleeps
    assert spoken(fake) == [
        ("/sleep", {"level": "1", "mode": "abort"}),
        ("/wake_up", {"tags": "weights"}),
        ("/wake_up", {"tags": "kv_cache"}),
        ("/pause", {"mode": "abort", "clear_cache": "false"}),
    ]
    assert not fake.asleep and fake.paused  # vLLM samples when it wakes


def test_a_server_that_was_left_asleep_is_woken_to_be_asked():
    fake = FakeVllm(sleeps=True)
    fake.asleep, fake.paused = {"kv_cache"}, True  # half-way
    facts = asyncio.run(VllmDialect().probe(fake.client()))
    assert facts.sleeps and not fake.asleep and not fake.paused


def test_a_server_that_runs_is_not_told_to_wake():
    fake = FakeVllm()
    assert not asyncio.run(VllmDialect().probe(fake.client())).sleeps
    assert spoken(fake) == [("/is_sleeping", {})]


def test_a_server_without_sleep_mode_is_refused_where_devices_are_shared():
    facts = ServerFacts(server="vllm 1", model="m", token_ids=True, log_probs="processed")
    needs = EngineRequirements(model_path="m", tokenizer=None, vocabulary=8, max_length=8, sleeps=True)
    with pytest.raises(UserError, match=r"can't release its devices.*--enable-sleep-mode"):
        check_facts(Vllm(), facts, needs, "http://x")


def test_nothing_runs_between_sleep_and_resume(tmp_path):
    asked = requests(3, 2)

    async def go(engine, servers):
        assert engine.capabilities.sleeps
        await engine.publish(update(1, WEIGHTS[1]))
        for server in servers:
            server.stop_after = 2
        task = asyncio.create_task(collect(engine, asked))
        await until(lambda: any(request.tokens for server in servers for request in list(server.running.values())))
        await engine.pause()
        await engine.sleep()  # the servers assert that they hold nothing
        assert all(server.asleep for server in servers)
        for server in servers:
            server.stop_after = None
        await asyncio.sleep(0.05)  # health checks wake nobody
        assert all(server.asleep and not server.running for server in servers) and not task.done()
        await engine.wake()
        assert all(server.paused and not server.asleep for server in servers)
        await engine.publish(update(2, WEIGHTS[2]))
        await engine.resume()
        return await task

    with fakes(2, facts=SLEEPS) as servers, engine_over(servers, tmp_path) as engine:
        check(asked, asyncio.run(go(engine, servers)), WEIGHTS)


def test_a_server_that_comes_back_during_an_update_waits_for_its_end(tmp_path):
    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[0].failing.add("/load")  # its health check
        await until(lambda: servers[0].url in engine._pool.events[-1] if engine._pool.events else False)
        entered, leave = threading.Event(), threading.Event()
        returning = engine._keeper._push

        async def push(replica):
            entered.set()
            await asyncio.to_thread(leave.wait, 30)
            return await returning(replica)

        engine._keeper._push = push
        servers[0].restart()
        servers[0].failing.clear()
        await until(entered.is_set)
        await engine.pause()
        await engine.sleep()
        leave.set()
        await until(lambda: servers[0].asleep)
        task = asyncio.create_task(collect(engine, requests(4, 2)))
        await asyncio.sleep(0.1)
        assert [row["in_service"] for row in (await engine.health()).detail["servers"]] == [False, True]
        await engine.wake()
        await engine.resume()
        given = await task

        async def all_serve():
            while (await engine.health()).detail["replicas"]["ready"] < 2:
                await asyncio.sleep(0.01)

        await asyncio.wait_for(all_serve(), 30)
        assert not any(server.asleep for server in servers)
        return given

    with fakes(2, facts=SLEEPS) as servers, engine_over(servers, tmp_path) as engine:
        check(requests(4, 2), asyncio.run(go(engine, servers)), WEIGHTS)


def test_a_long_update_is_no_absence_of_the_servers(tmp_path):
    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[0].failing.add("/sleep")
        await engine.pause()
        await engine.sleep()
        task = asyncio.create_task(collect(engine, requests(2, 2)))
        await asyncio.sleep(0.5)  # longer than `away_seconds`
        assert not task.done()
        servers[0].failing.clear()
        await engine.wake()
        await engine.resume()
        return await task

    with fakes(1, facts=SLEEPS) as servers, engine_over(servers, tmp_path, away_seconds=0.3) as engine:
        check(requests(2, 2), asyncio.run(go(engine, servers)), WEIGHTS)


@pytest.mark.parametrize("call", ["sleep", "wake"])
def test_a_server_that_fails_is_ejected_and_returns_when_the_trainer_is_done(call, tmp_path):
    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[0].failing.add(f"/{call}")
        await engine.pause()
        await engine.sleep()
        if call == "wake":
            await engine.wake()
        health = await engine.health()
        assert [row["in_service"] for row in health.detail["servers"]] == [False, True]
        assert "broken on purpose" in health.detail["servers"][0]["reason"]
        servers[0].failing.clear()
        if call == "sleep":
            probed = servers[0].calls["/facts"]
            await asyncio.sleep(0.2)
            assert servers[0].calls["/facts"] == probed  # it does not return while the trainer has the devices
            await engine.wake()
        await engine.publish(update(2, WEIGHTS[2]))
        await engine.resume()

        async def all_serve():
            while (await engine.health()).detail["replicas"]["ready"] < 2:
                await asyncio.sleep(0.01)

        await asyncio.wait_for(all_serve(), 30)
        return await collect(engine, requests(4, 2))

    with fakes(2, facts=SLEEPS) as servers, engine_over(servers, tmp_path) as engine:
        check(requests(4, 2), asyncio.run(go(engine, servers)), WEIGHTS)
