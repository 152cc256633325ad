"""A server is started again between two health checks, with the weights of its start, and nothing breaks: what it gives
until that is noticed never counts."""

import asyncio

import numpy as np
import pytest

from proxima.data import UserError
from proxima.engine.http.dialect import ServerHealth
from proxima.engine.http.version_proof import VersionProof
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import ScoreRequest, ServerError
from tests.engine.http.fake_model import sequence_log_probs
from tests.engine.http.plain_servers import IN_PLACE, WEIGHTS, check, go_on, held, requests, update
from tests.processes import until

SILENT = {"version_spans": False}  # completions do not say which weights sampled them
NEVER = 3600.0  # between two health checks: none comes but those that something asks for


async def restarted(fleet, facts=None, **settings):
    """An engine over two servers with weights of version 1, the first of which was started again since: only the label
    tells."""
    engine, servers = fleet(2, facts=facts, health_seconds=NEVER, **settings, published=True)
    servers[0].restart()
    return engine, servers


async def running(engine, servers, asked):
    """What asks for the completions, once both servers hold some after two tokens."""
    for server in servers:
        server.stop_after = 2
    task = asyncio.create_task(collect(engine, asked))
    await until(lambda: all(held(server, 2) for server in servers))
    return task


@pytest.mark.slow
async def test_completions_of_a_server_that_was_started_again_do_not_count(fleet):
    asked = requests(6, 3)
    engine, servers = await restarted(fleet, SILENT, max_running=4)
    check(asked, await collect(engine, asked), 1)
    detail = (await engine.health()).detail
    assert servers[0].calls["/generate"] > 0 and detail["replicas"]["lost"] > 0
    assert any("it has weights 'start', not" in line for line in detail["events"])


@pytest.mark.parametrize(("how", "spans"), [("breaks", False), ("breaks", True), ("is interrupted", False)])
async def test_parts_of_completions_of_such_a_server_do_not_count(how, spans, fleet):
    """Their ends, where a server would say which weights sampled them, never come."""
    asked = requests(2, 2, first=3)
    engine, servers = await restarted(fleet, IN_PLACE | {"version_spans": spans}, max_running=2)
    if how == "breaks":
        servers[0].script += ["break"] * 4
        check(asked, await collect(engine, asked))
        return
    task = await running(engine, servers, asked)
    await engine.pause("keep")
    go_on(servers)
    await engine.resume()
    check(asked, await task)


async def test_completions_held_when_new_weights_come_are_of_those_before(fleet):
    """It was started again before, has the newest weights when it is asked what it has, and then the stream breaks."""
    asked = requests(2, 2, first=3)
    engine, servers = await restarted(fleet, IN_PLACE, max_running=2)
    task = await running(engine, servers, asked)
    await engine.publish(update(2))
    for replica, server in zip(engine._pool.replicas, servers, strict=True):
        calls = server.calls["/load"]
        engine._loop.submit(replica.status.check_soon.set)
        await until(lambda server=server, calls=calls: server.calls["/load"] > calls)
        server.break_streams()
        server.stop_after = None
    check(asked, await task)


async def test_scores_of_a_server_that_was_started_again_do_not_count(fleet):
    asked = [ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4, i]) for i in range(6)]
    engine, servers = await restarted(fleet)
    result = await engine.score(asked)
    assert servers[0].calls["/score"] > 1
    for request, column in zip(asked, result, strict=True):
        expected = sequence_log_probs(WEIGHTS[1], request.prompt_tokens, request.tokens)
        np.testing.assert_allclose(column, expected, atol=1e-6)


async def test_a_server_that_never_says_our_label_is_one_line(fleet):
    engine, (server,) = fleet(facts=SILENT, retries=0)
    server.forgetful = True
    await engine.publish(update(1))
    with pytest.raises(UserError, match="failed once, the last time at .*: it has weights 'start', not"):
        await collect(engine, requests(1, 1))


async def test_a_server_that_does_not_confirm_costs_seconds_and_the_tokens(fleet, monkeypatch):
    """A completion broke off, and nothing comes from the server; any other call would wait for an hour."""
    monkeypatch.setattr("proxima.engine.http.replica_pool.CONFIRM_SECONDS", 0.01)
    asked = requests(1, 1, first=3)
    engine, (server,) = fleet(facts=IN_PLACE | SILENT, health_seconds=NEVER, call_seconds=NEVER)
    server.script += ["break"]
    health, counts = server.health, engine._pool.counts
    server.health = lambda: health() if counts["tokens_lost"] else asyncio.Event().wait()
    check(asked, await collect(engine, asked))
    assert counts["tokens_lost"] == 1 and counts["ejected"] == 0


async def test_one_question_answers_all_who_came_before_it():
    asked, answer = [], asyncio.Event()

    async def ask():
        asked.append(len(asked))
        number = len(asked)
        await asyncio.sleep(0)
        await answer.wait()
        if number > 2:
            raise ServerError("http://x", "/load", "status 500")
        return ServerHealth(weight_version=f"v{number}")

    check = VersionProof(ask)
    first = asyncio.create_task(check.ask())
    await until(lambda: asked == [0])
    others = [asyncio.create_task(check.ask()) for _ in range(50)]
    await asyncio.sleep(0)
    answer.set()
    labels = [(await entry).weight_version for entry in (first, *others)]
    failed = await asyncio.gather(*(check.ask() for _ in range(5)), return_exceptions=True)
    assert labels == ["v1", *["v2"] * 50] and asked == [0, 1, 2]  # the last five share one
    assert all(isinstance(entry, ServerError) and entry.reason == "status 500" for entry in failed)


async def test_a_question_whose_asker_leaves_is_asked_again():
    hanging = True

    async def ask():
        while hanging:
            await asyncio.sleep(0.001)
        return ServerHealth(weight_version="v")

    check = VersionProof(ask)
    first = asyncio.create_task(check.ask())
    await asyncio.sleep(0)
    second = asyncio.create_task(check.ask())
    await asyncio.sleep(0)
    first.cancel()
    hanging = False
    assert (await second).weight_version == "v"
