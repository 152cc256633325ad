"""A server is started again between two health checks, with the weights of its start, and nothing breaks: what it gives
until that is noticed never counts."""

import asyncio

import numpy as np
import pytest

from proxima.data import UserError
from proxima.engine.http.client import ServerError
from proxima.engine.http.dialect import ServerHealth
from proxima.engine.http.version_proof import SharedQuestion
from proxima.engine.local import collect
from proxima.engine.protocol import ScoreRequest
from tests.engine.http.fake_model import sequence_log_probs
from tests.engine.http.plain_dialect import engine_over, fakes, requests, update
from tests.engine.http.test_faulty_servers import WEIGHTS, check, held, until

SILENT = {"version_spans": False}  # completions do not say which weights sampled them
NEVER = 600.0  # between two health checks: none comes but those that something asks for


def restart(server):
    """With another process's name hidden, as a vLLM server does: only the label tells."""
    server.restart()
    server.instance -= 1


def test_completions_of_a_server_that_was_started_again_do_not_count(tmp_path):
    asked = requests(6, 3)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        restart(servers[0])
        given = await collect(engine, asked)
        return given, await engine.health()

    with (
        fakes(2, facts=SILENT) as servers,
        engine_over(servers, tmp_path, health_seconds=NEVER, max_running=4) as engine,
    ):
        given, health = asyncio.run(go(engine, servers))
        assert servers[0].calls["/generate"] > 0
    check(asked, given)
    assert {v for completion in given for v in completion.policy_version.tolist()} == {1}
    assert health.detail["replicas"]["lost"] > 0
    assert any("it has weights 'start', not" in line for line in health.detail["events"])


@pytest.mark.parametrize("spans", [False, True])
@pytest.mark.parametrize("how", ["breaks", "is interrupted"])
def test_parts_of_completions_of_such_a_server_do_not_count(how, spans, tmp_path):
    """Their ends, where a server would say which weights sampled them, never come."""
    asked = requests(2, 2, first=3)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        restart(servers[0])
        if how == "breaks":
            servers[0].script += ["break"] * 4
            return await collect(engine, asked)
        for server in servers:
            server.stop_after = 2
        task = asyncio.create_task(collect(engine, asked))
        await until(lambda: all(held(server, 2) for server in servers))
        await engine.pause("keep")
        for server in servers:
            server.stop_after = None
        await engine.resume()
        return await task

    facts = {"version_spans": spans, "batch_invariant": False, "pause_modes": ["abort"]}
    with (
        fakes(2, facts=facts) as servers,
        engine_over(servers, tmp_path, health_seconds=NEVER, max_running=2) as engine,
    ):
        given = asyncio.run(go(engine, servers))
    check(asked, given)


def test_tokens_of_a_broken_completion_are_kept_where_the_server_is_still_ours(tmp_path):
    asked = requests(1, 1, first=3, max_tokens=6)
    facts = SILENT | {"batch_invariant": False}

    async def go(engine, server):
        await engine.publish(update(1, WEIGHTS[1]))
        server.script += ["break"]
        return await collect(engine, asked)

    with fakes(1, facts=facts) as servers, engine_over(servers, tmp_path) as engine:
        given = asyncio.run(go(engine, servers[0]))
    check(asked, given)
    first, second = servers[0].bodies
    assert second["tokens"] == [*first["tokens"], int(given[0].tokens[0])]


def test_what_a_server_holds_when_new_weights_come_was_sampled_by_those_before(tmp_path):
    """It was started again before, has the newest weights when it is asked what it has, and then the stream breaks."""
    asked = requests(2, 2, first=3)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        restart(servers[0])
        for server in servers:
            server.stop_after = 2
        task = asyncio.create_task(collect(engine, asked))
        await until(lambda: all(held(server, 2) for server in servers))
        await engine.publish(update(2, WEIGHTS[2]))
        for replica, server in zip(engine._pool.replicas, servers, strict=True):
            calls = server.calls["/load"]
            engine._loop.submit(engine._pool.check_soon, replica)
            await until(lambda server=server, calls=calls: server.calls["/load"] > calls)
            server.loop.call(break_streams(server))
            server.stop_after = None
        return await task

    facts = {"batch_invariant": False, "pause_modes": ["keep"]}
    with (
        fakes(2, facts=facts) as servers,
        engine_over(servers, tmp_path, health_seconds=NEVER, max_running=2) as engine,
    ):
        given = asyncio.run(go(engine, servers))
    check(asked, given)


async def break_streams(server):
    for task in list(server.handlers):
        task.cancel()


def test_scores_of_a_server_that_was_started_again_do_not_count(tmp_path):
    asked = [ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4, i]) for i in range(6)]

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        restart(servers[0])
        return await engine.score(asked)

    with fakes(2) as servers, engine_over(servers, tmp_path, health_seconds=NEVER) as engine:
        result = asyncio.run(go(engine, servers))
        assert servers[0].calls["/score"] > 1
    for request, column in zip(asked, result, strict=True):
        expected = sequence_log_probs(WEIGHTS[1], request.prompt_tokens, request.tokens)
        np.testing.assert_allclose(column, expected, atol=1e-6)


def test_a_server_that_never_says_our_label_is_one_line(tmp_path):
    async def go(engine, server):
        server.forgetful = True
        await engine.publish(update(1, WEIGHTS[1]))
        await collect(engine, requests(1, 1))

    with (
        fakes(1, facts=SILENT) as servers,
        engine_over(servers, tmp_path, retries=0) as engine,
        pytest.raises(UserError, match="failed once, the last time at .*: it has weights 'start', not"),
    ):
        asyncio.run(go(engine, servers[0]))


def test_one_question_answers_all_who_came_before_it():
    async def go():
        asked, answer = [], asyncio.Event()

        async def ask():
            asked.append(len(asked))
            number = len(asked)
            await asyncio.sleep(0)
            await answer.wait()
            if number > 2:
                raise ServerError("http://x", "/load", "status 500")
            return ServerHealth(weight_version=f"v{number}")

        check = SharedQuestion(ask, "http://x")
        first = asyncio.create_task(check.ask(10))
        await until(lambda: asked == [0])
        others = [asyncio.create_task(check.ask(10)) for _ in range(50)]
        await asyncio.sleep(0)
        answer.set()
        versions = [(await entry).weight_version for entry in (first, *others)]
        failed = await asyncio.gather(*(check.ask(10) for _ in range(5)), return_exceptions=True)
        return asked, versions, failed

    asked, versions, failed = asyncio.run(go())
    assert versions == ["v1", *["v2"] * 50] and asked == [0, 1, 2]  # the last five share one
    assert all(isinstance(entry, ServerError) and entry.reason == "status 500" for entry in failed)


def test_a_question_whose_asker_leaves_is_asked_again_and_one_without_an_answer_has_a_deadline():
    async def go():
        hanging = True

        async def ask():
            while hanging:
                await asyncio.sleep(0.001)
            return ServerHealth(weight_version="v")

        check = SharedQuestion(ask, "http://x")
        first = asyncio.create_task(check.ask(10))
        await asyncio.sleep(0)
        second = asyncio.create_task(check.ask(10))
        await asyncio.sleep(0)
        first.cancel()
        hanging = False
        assert (await second).weight_version == "v"
        hanging = True
        with pytest.raises(ServerError, match=r"no answer to a health check for 0\.01 s"):
            await check.ask(0.01)

    asyncio.run(go())
