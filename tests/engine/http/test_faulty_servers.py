"""Servers that fail: nothing is lost, nothing comes twice, and no wrong answer counts."""

import asyncio
import threading
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from proxima.data import UserError
from proxima.engine.executor import Executor
from proxima.engine.http.replica_state import STREAK
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import GrammarRefusedError, ScoreRequest, ServerError, StoppedWaitingError
from tests.engine.http.plain_servers import (
    WEIGHTS,
    PlainDialect,
    check,
    go_on,
    hanging_calls_ended,
    held,
    replicas,
    requests,
    update,
)
from tests.processes import until


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "count"), [("error", 1), ("overload", 2), ("hang", 2), ("break", 1), ("nan", 2)])
async def test_one_bad_completion_is_asked_for_again_and_is_the_same(fault, count, fleet):
    asked = requests(4, 3)
    engine, servers = fleet(count)
    clean = await collect(engine, asked)
    for server in servers:
        server.script += [None, fault]
    async with hanging_calls_ended(engine, servers):
        given = await collect(engine, asked)
    counts = (await engine.health()).detail["replicas"]
    check(asked, given)
    assert given == clean and engine.capabilities.deterministic  # the draws belong to the request
    assert counts["retried"] == count
    assert counts["lost"] == (count if fault == "nan" else 0)


@pytest.mark.parametrize(("fault", "spans"), [("hang", True), ("break", True), ("break", False)])
async def test_the_tokens_of_a_broken_completion_are_kept(fault, spans, fleet):
    """A server whose completions differ each time: beginning again would prefer short completions. One that does not
    say with them which weights sampled them is asked."""
    asked = requests(1, 1, first=3, max_tokens=6)
    engine, (server,) = fleet(facts={"batch_invariant": False, "version_spans": spans}, published=True)
    server.script += [fault]
    task = asyncio.create_task(collect(engine, asked))
    if fault == "hang":
        await until(lambda: engine._pool.replicas[0].received)
        (call,) = engine._pool.replicas[0].running.values()
        engine._loop.submit(call.limit, 0.0)  # its idle seconds are over
    given = await task
    assert not engine.capabilities.deterministic
    check(asked, given, 1)
    first, second = server.requests
    assert list(second.tokens) == [*first.tokens, int(given[0].tokens[0])]
    assert second.sampling.max_tokens == first.sampling.max_tokens - 1
    assert second.seed != first.seed  # the server begins its draws again


async def test_a_broken_completion_under_a_grammar_begins_anew(fleet):
    """A server that is given a part of it begins the grammar anew after that part."""
    (plain,) = requests(1, 1, first=3, max_tokens=6)
    engine, (server,) = fleet(facts={"batch_invariant": False}, published=True)
    server.script += ["break"]
    given = await collect(engine, [replace(plain, grammar="{}")])
    check([plain], given, 1)
    first, second = server.requests
    assert list(second.tokens) == list(first.tokens) and second.sampling == first.sampling
    assert [request.grammar for request in server.requests] == ["{}", "{}"]


async def test_a_grammar_that_a_server_refuses_is_the_request_s_fault(fleet, monkeypatch):
    """It is not tried again, and costs the server nothing; the next request is answered."""
    plain = requests(1, 1)
    engine, (server,) = fleet(retries=0)
    complete = server.complete

    def refuses(client, request):
        if request.grammar is not None:
            server.requests.append(request)
            raise ServerError(client.url, "/generate", "status 400: no such type", 400)
        return complete(client, request)

    monkeypatch.setattr(server, "complete", refuses)
    for _ in range(STREAK + 1):
        with pytest.raises(GrammarRefusedError, match="no such type"):
            await collect(engine, [replace(plain[0], grammar="{}")])
    counts = (await engine.health()).detail["replicas"]
    assert (counts["retried"], counts["ejected"], len(server.requests)) == (0, 0, STREAK + 1)
    check(plain, await collect(engine, plain))


@pytest.mark.slow
async def test_a_server_that_continues_after_the_stop_token(fleet):
    asked = requests(6, 4)
    engine, (server,) = fleet()
    clean = await collect(engine, asked)
    server.rates = {"unstopped": 1.0}
    assert await collect(engine, asked) == clean


async def test_a_completion_that_always_fails_ends_the_run_in_one_line(fleet):
    engine, (server,) = fleet(rates={"nan": 1.0}, retries=2)
    with pytest.raises(UserError, match=r"prompt 0, sample 0: failed 3 times in a row, .*: a log-prob is nan"):
        await collect(engine, requests(1, 1))
    assert server.calls["/generate"] == 3


async def test_a_server_of_another_model_is_out_of_service(fleet):
    asked = requests(4, 2)
    engine, servers = fleet(2)
    servers[0].facts["model"] = "another"
    await until(lambda: engine._pool.counts["ejected"])
    check(asked, await collect(engine, asked))
    line = f"engine: {servers[0].url} is out of service: it serves another now, not formula"
    assert line in (await engine.health()).detail["events"]


@pytest.mark.slow
async def test_failing_hanging_dying_and_coming_back(fleet):
    """Four servers, 5 % of calls failing and 5 % hanging, and one dies with what it runs and comes back."""
    asked, later = requests(12, 4), requests(6, 4, first=100)
    rates = {"error": 0.05, "hang": 0.05}
    engine, servers = fleet(4, facts={"batch_invariant": False}, rates=rates, slow=0.001, max_running=8)

    async def die_and_return():
        await until(lambda: servers[0].calls["/generate"] >= 8)
        servers[0].die()
        await until(lambda: sum(server.calls["/generate"] for server in servers) >= 30)
        servers[0].come_back()

    await engine.publish(update(1))
    async with hanging_calls_ended(engine, servers):
        disaster = asyncio.create_task(die_and_return())
        check(asked, await collect(engine, asked), 1)
        await disaster
        await until(lambda: engine._pool.counts["returned"] >= 1)
        check(later, await collect(engine, later), 1)
    health = await engine.health()
    assert health.detail["replicas"]["retried"] > 0
    assert health.detail["replicas"]["ejected"] >= 1
    assert servers[0].weights == WEIGHTS[1]
    assert any("is out of service" in line for line in health.detail["events"])


@pytest.mark.slow
async def test_a_server_that_takes_no_weights_is_ejected_and_catches_up(fleet):
    engine, servers = fleet(2)
    servers[0].fail("/weights")
    await engine.publish(update(1))
    assert replicas(engine) == [False, True]
    check(requests(4, 2), await collect(engine, requests(4, 2)))
    await engine.publish(update(2))
    servers[0].failing.clear()
    await until(lambda: engine._pool.counts["returned"] == 1)
    check(requests(4, 2), await collect(engine, requests(4, 2)), 2)
    assert servers[0].weights == WEIGHTS[2]


async def test_a_server_that_hangs_while_it_returns_holds_up_no_new_weights(fleet, monkeypatch):
    engine, servers = fleet(2, published=True)
    load, hangs = PlainDialect.load_folder, threading.Event()

    async def load_or_hang(dialect, client, facts, weights):
        if weights.version == 1:
            hangs.set()
            await asyncio.sleep(3600)
        await load(dialect, client, facts, weights)

    monkeypatch.setattr(PlainDialect, "load_folder", load_or_hang)
    servers[0].restart()
    await until(hangs.is_set)
    await asyncio.wait_for(engine.publish(update(2)), 300)
    await until(lambda: engine._pool.counts["returned"] == 1)
    assert [server.weights for server in servers] == [WEIGHTS[2]] * 2


@pytest.mark.slow
async def test_no_server_left_is_one_line(fleet):
    engine, (server,) = fleet(away_seconds=0.1)
    server.die()
    with pytest.raises(UserError, match="the server is out of service: .*can't be reached; start it again"):
        await collect(engine, requests(1, 1))
    with pytest.raises(UserError, match="out of service"):
        await engine.publish(update(1))


def hangs_out_of_service(engine, monkeypatch):
    """No health check of a server that has been ejected ends."""
    health = PlainDialect.health

    async def health_or_hang(dialect, client, facts):
        if engine._pool.counts["ejected"]:
            await asyncio.Event().wait()
        return await health(dialect, client, facts)

    monkeypatch.setattr(PlainDialect, "health", health_or_hang)


async def test_a_wait_for_a_server_ends_also_while_a_call_to_it_hangs(fleet, monkeypatch):
    engine, (server,) = fleet(away_seconds=0.1, published=True)
    hangs_out_of_service(engine, monkeypatch)
    server.fail("/weights")
    with pytest.raises(UserError, match="the server is out of service: .*; start it again"):
        await asyncio.wait_for(engine.publish(update(1)), 300)


async def test_a_wait_for_a_server_ends_when_the_run_is_to_stop(fleet, monkeypatch):
    engine, (server,) = fleet(away_seconds=3600.0, published=True)
    hangs_out_of_service(engine, monkeypatch)
    server.fail("/weights")
    publishing = asyncio.ensure_future(engine.publish(update(1)))
    await until(lambda: engine._pool.counts["ejected"] == 1)
    Executor(engine).stop_waiting()
    with pytest.raises(StoppedWaitingError, match="the server is out of service"):
        await asyncio.wait_for(publishing, 300)


async def test_a_run_that_is_to_stop_keeps_the_servers_that_work(fleet):
    engine, servers = fleet(2)
    engine.stop_waiting()
    servers[0].die()
    check(requests(4, 2), await collect(engine, requests(4, 2)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fact", "value", "reason"),
    [
        ("model", "another", "its model is another"),
        ("takes_weights", False, "it can't load new weights"),
        ("sizes", {"num_hidden_layers": 6}, "its model has 6 layers, and that of the others 4 layers"),
    ],
)
async def test_a_server_that_has_become_another_does_not_return(fact, value, reason, fleet):
    engine, servers = fleet(2, facts={"sizes": {"num_hidden_layers": 4}}, published=True)
    servers[0].die()
    servers[0].facts[fact] = value
    servers[0].come_back()
    await until(lambda: reason in engine._pool.replicas[0].status.reason)
    check(requests(4, 2), await collect(engine, requests(4, 2)))
    assert servers[0].weights == 0.5


async def test_scoring_goes_elsewhere_too(fleet):
    asked = [ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4, i]) for i in range(6)]
    engine, servers = fleet(2)
    clean = await engine.score(asked)
    servers[0].fail("/score")
    assert all(np.array_equal(a, b) for a, b in zip(await engine.score(asked), clean, strict=True))
    servers[1].fail("/score")
    with pytest.raises(UserError, match="scoring: failed 4 times in a row"):
        await engine.score(asked[:1])


async def test_a_caller_that_leaves_ends_its_completions_at_the_server(fleet):
    engine, (server,) = fleet()
    server.stop_after = 2
    stream = engine.generate(requests(2, 2))
    task = asyncio.ensure_future(anext(stream))
    await until(lambda: server.begun == 4 and held(server, 2))
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    await stream.aclose()
    await until(lambda: not server.running)
    go_on([server])
    check(requests(2, 2), await collect(engine, requests(2, 2)))


@pytest.mark.slow
async def test_a_call_that_is_being_closed_can_be_ended(fleet, monkeypatch):
    """Its answer was wrong, and while its stream is closed the server is ejected."""
    engine, servers = fleet(2)
    replica, stream, ended = engine._pool.replicas[0], engine._pool.replicas[0].dialect.stream, []

    async def slowly_closed(client, facts, request):
        try:
            async for chunk in stream(client, facts, request):
                yield chunk
        finally:
            for call in list(replica.running.values()):
                try:
                    call.timeout.reschedule(call.timeout.when())
                except RuntimeError:
                    ended.append(call)
                call.end("interrupted")

    monkeypatch.setattr(type(replica.dialect), "stream", staticmethod(slowly_closed))
    servers[0].script += ["nan"]
    check(requests(2, 2), await collect(engine, requests(2, 2)))
    assert ended
