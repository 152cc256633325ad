"""Servers that refuse the key in the middle of a run: others go on, and when none is left the run ends at once."""

import asyncio

import pytest

from proxima.data import UserError
from proxima.engine.local import collect
from proxima.engine.protocol import ScoreRequest
from tests.engine.http.fake_server import FakeServer, _respond
from tests.engine.http.plain_dialect import engine_over, fakes, requests, update
from tests.engine.http.test_faulty_servers import WEIGHTS, check, until

CALLS = ("facts", "load", "tokenize", "score", "pause", "resume", "abort", "weights", "forget")


def refuse(server: FakeServer, status: int = 401) -> None:
    """From now on every call is of a stranger."""

    async def generate(reader, writer, body):
        _respond(writer, status, {"error": "another key"}, last=True)
        await writer.drain()

    server._generate = generate
    for name in CALLS:
        setattr(server, f"_{name}", lambda _: (status, {"error": "another key"}))


def accept(server: FakeServer) -> None:
    for name in ("generate", *CALLS):
        delattr(server, f"_{name}")


def refuse_completions(server: FakeServer, status: int) -> None:
    """Health, facts and weights are fine; a completion is not."""

    async def generate(reader, writer, body):
        _respond(writer, status, {"error": {"message": "your plan has\nno completions"}}, last=True)
        await writer.drain()

    server._generate = generate


@pytest.mark.parametrize("status", [401, 403])
def test_a_server_that_refuses_completions_alone_does_not_return_for_ever(status, tmp_path):
    async def go(engine, server):
        await engine.publish(update(1, WEIGHTS[1]))
        refuse_completions(server, status)
        with pytest.raises(UserError) as error:
            await collect(engine, requests(4, 2))
        return str(error.value), await engine.health()

    with fakes(1) as servers, engine_over(servers, tmp_path, away_seconds=3600.0) as engine:
        said, health = asyncio.run(asyncio.wait_for(go(engine, servers[0]), 30))
    assert said.count("\n") == 0 and f"refused with status {status}: your plan has no completions" in said
    assert "3 times in a row, without a completion between" in said and "token_env" in said
    assert health.detail["replicas"]["ejected"] == 3 and health.detail["replicas"]["returned"] == 2
    assert servers[0].calls["/weights"] == 1  # they were there at each return


def test_refusals_with_completions_between_do_not_add_up(tmp_path):
    async def go(engine, server):
        for returned in range(1, 6):
            refuse_completions(server, 403)
            task = asyncio.create_task(collect(engine, requests(1, 1)))
            await until(lambda count=returned: engine._pool.counts["ejected"] == count)
            del server._generate
            check(requests(1, 1), await task)

    with fakes(1) as servers, engine_over(servers, tmp_path) as engine:
        asyncio.run(asyncio.wait_for(go(engine, servers[0]), 60))


def test_a_server_that_always_has_other_weights_again_is_given_up(tmp_path, monkeypatch):
    """It passes the probe at each return, and calls its weights otherwise a moment later."""
    monkeypatch.setattr("proxima.engine.http.replica_keeper.LONGEST_WAIT", 0.02)
    monkeypatch.setattr("proxima.engine.http.replica.FRUITLESS", 4)

    async def go(engine, server):
        await engine.publish(update(1, WEIGHTS[1]))
        server.stop_after = 0
        answered, load = 0, server._load

        def flaps(body):
            nonlocal answered
            answered += 1
            status, answer = load(body)
            return status, answer | ({"label": "another"} if answered % 4 == 0 else {})

        server._load = flaps
        with pytest.raises(UserError, match=r"it has weights 'another'.*4 times in a row"):
            await collect(engine, requests(1, 1))

    with fakes(1) as servers, engine_over(servers, tmp_path, away_seconds=3600.0) as engine:
        asyncio.run(asyncio.wait_for(go(engine, servers[0]), 30))


@pytest.mark.parametrize("status", [401, 403])
@pytest.mark.parametrize("when", ["generating", "scoring", "publishing", "pausing"])
def test_one_server_that_refuses_the_key_is_ejected_and_returns(when, status, tmp_path):
    asked = requests(6, 2)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        refuse(servers[0], status)
        if when == "scoring":
            for i in range(6):
                await engine.score([ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4, i])])
        elif when == "publishing":
            await engine.publish(update(2, WEIGHTS[2]))
        elif when == "pausing":
            await engine.pause("abort")
            await engine.resume()
        given = await collect(engine, asked)
        out = await engine.health()
        accept(servers[0])
        await until(lambda: engine._pool.counts["returned"] == 1)
        return given, out, await collect(engine, asked)

    with fakes(2) as servers, engine_over(servers, tmp_path, retries=0, max_running=2) as engine:
        given, out, again = asyncio.run(go(engine, servers))
    check(asked, given)
    check(asked, again)
    assert [server["in_service"] for server in out.detail["servers"]] == [False, True]
    assert any(f"refused with status {status}: another key" in line for line in out.detail["events"])


@pytest.mark.parametrize("when", ["generating", "scoring", "publishing"])
def test_the_run_ends_at_once_when_all_refuse_the_key(when, tmp_path):
    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        for server in servers:
            refuse(server)
        if when == "scoring":
            await engine.score([ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4])])
        elif when == "publishing":
            await engine.publish(update(2, WEIGHTS[2]))
        else:
            await collect(engine, requests(4, 2))

    with (
        fakes(2) as servers,
        engine_over(servers, tmp_path, away_seconds=3600.0) as engine,
        pytest.raises(UserError, match=r"all 2 servers are out of service: .*status 401.*; check token_env"),
    ):
        asyncio.run(asyncio.wait_for(go(engine, servers), 60))


def test_a_refused_key_is_an_error_at_the_start(tmp_path):
    with fakes(2) as servers:
        refuse(servers[1], 403)
        with pytest.raises(UserError, match="refused with status 403.*check token_env"), engine_over(servers, tmp_path):
            pass


def test_a_server_that_is_away_is_waited_for_when_the_other_refuses_the_key(tmp_path):
    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[0].die()
        refuse(servers[1])
        task = asyncio.create_task(collect(engine, requests(4, 2)))
        await until(lambda: not engine._pool.serving)
        servers[0].come_back()
        return await task

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        check(requests(4, 2), asyncio.run(go(engine, servers)))
