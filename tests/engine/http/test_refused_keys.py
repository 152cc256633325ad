"""Servers that refuse the key in the middle of a run: others go on, and when none is left the run ends at once."""

import asyncio
from dataclasses import replace

import pytest

from proxima.data import UserError
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import ScoreRequest
from tests.engine.http.plain_servers import check, engine_over, fakes, held, replicas, requests, update
from tests.processes import until

CALLS = ("/facts", "/load", "/tokenize", "/generate", "/score", "/pause", "/resume", "/weights", "/forget")


def refuse(server, status=401):
    """From now on every call is of a stranger."""
    server.fail(*CALLS, status=status, message="another key")


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_refuses_completions_alone_does_not_return_for_ever(status, fleet):
    engine, (server,) = fleet(away_seconds=3600.0, published=True)
    server.fail("/generate", status=status, message={"message": "your plan has\nno completions"})
    with pytest.raises(UserError) as error:
        await collect(engine, requests(4, 2))
    said, counts = str(error.value), (await engine.health()).detail["replicas"]
    assert said.count("\n") == 0 and f"refused with status {status}: your plan has no completions" in said
    assert "3 times in a row, without a completion in between" in said and "check token_env" in said
    assert counts["ejected"] == 3 and counts["returned"] == 2
    assert server.calls["/weights"] == 3  # and again at each return


async def test_refusals_with_completions_between_do_not_add_up(fleet, monkeypatch):
    monkeypatch.setattr("proxima.engine.http.replica_state.FRUITLESS", 4)
    engine, (server,) = fleet()
    for returned in range(1, 6):
        server.fail("/generate", status=403, times=1)
        check(requests(1, 1), await collect(engine, requests(1, 1)))
        assert engine._pool.counts["ejected"] == returned


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [0, 1])
async def test_a_server_that_always_has_other_weights_again_is_given_up(tokens, fleet, monkeypatch):
    """It passes the probe at each return, and calls its weights otherwise a moment later, whatever it has produced."""
    monkeypatch.setattr("proxima.engine.http.replica_state.LONGEST_WAIT", 0.02)
    monkeypatch.setattr("proxima.engine.http.replica_state.FRUITLESS", 4)
    engine, (server,) = fleet(away_seconds=3600.0, published=True)
    server.stop_after, health = tokens, server.health

    async def flaps():
        said = await health()
        return replace(said, weight_version="another") if held(server, tokens) else said

    server.health = flaps
    with pytest.raises(UserError, match=r"it has weights 'another'.*4 times in a row"):
        await collect(engine, requests(1, 1, first=3))
    assert server.begun == 4


@pytest.mark.slow
@pytest.mark.parametrize(("when", "status"), [("scoring", 403), ("publishing", 401), ("pausing", 403)])
async def test_one_server_that_refuses_the_key_is_ejected_and_returns(when, status, fleet):
    asked = requests(6, 2)
    engine, servers = fleet(2, retries=0, max_running=2, published=True)
    refuse(servers[0], status)
    if when == "scoring":
        for i in range(6):
            await engine.score([ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4, i])])
    elif when == "publishing":
        await engine.publish(update(2))
    elif when == "pausing":
        await engine.pause("abort")
        await engine.resume()
    check(asked, await collect(engine, asked))
    assert replicas(engine) == [False, True]
    events = (await engine.health()).detail["events"]
    assert any(f"refused with status {status}: another key" in line for line in events)
    servers[0].failing.clear()
    await until(lambda: engine._pool.counts["returned"] == 1)
    check(asked, await collect(engine, asked))


@pytest.mark.parametrize("when", ["generating", "scoring", "publishing"])
async def test_the_run_ends_at_once_when_all_refuse_the_key(when, fleet):
    engine, servers = fleet(2, away_seconds=3600.0, published=True)
    for server in servers:
        refuse(server)
    with pytest.raises(UserError, match=r"all 2 servers are out of service: .*status 401.*; check token_env"):
        if when == "scoring":
            await engine.score([ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4])])
        elif when == "publishing":
            await engine.publish(update(2))
        else:
            await collect(engine, requests(4, 2))


def test_a_refused_key_is_an_error_at_the_start():
    servers = fakes(2)
    refuse(servers[1], 403)
    with pytest.raises(UserError, match="refused with status 403.*check token_env"), engine_over(servers):
        pass


@pytest.mark.slow
async def test_an_absent_server_is_awaited_when_the_other_refuses_the_key(fleet):
    engine, servers = fleet(2, published=True)
    servers[0].die()
    refuse(servers[1])
    task = asyncio.create_task(collect(engine, requests(4, 2)))
    await until(lambda: not engine._pool.serving)
    servers[0].come_back()
    check(requests(4, 2), await task)
