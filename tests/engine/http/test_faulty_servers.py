"""Servers that fail: nothing is lost, nothing comes twice, and no wrong answer counts."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest

from proxima.data import UserError
from proxima.engine.local import collect
from proxima.engine.protocol import ScoreRequest
from tests.engine.http.fake_model import STOP
from tests.engine.http.plain_dialect import engine_over, expected, fakes, requests, update

WEIGHTS = {0: 0.5, 1: 0.8, 2: 1.3}
LONG = 120.0  # seconds after which something must have happened
FAULTS = ("error", "overload", "hang", "break", "short", "nan", "other", "impossible", "spill")


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """A busy machine makes a server fail again before it returns, which must not cost a minute each time."""
    monkeypatch.setattr("proxima.engine.http.replica_keeper.LONGEST_WAIT", 0.5)
    monkeypatch.setattr("proxima.engine.http.client.SHORTEST_BREAK", 0.01)


def check(asked, given, weights=WEIGHTS):
    """Every request once, each by the formula."""
    assert [completion.key for completion in given] == [(r.prompt.uid, r.sample, 0) for r in asked]
    for request, completion in zip(asked, given, strict=True):
        np.testing.assert_allclose(completion.sampled_log_prob, expected(request, completion, weights), atol=1e-6)
        assert 1 <= len(completion.tokens) <= request.sampling.max_tokens
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == STOP else "length")
        assert STOP not in completion.tokens[:-1]


def held(server, tokens):
    """Whether all that runs has come to the token where it waits."""
    return bool(server.running) and all(len(request.tokens) == tokens for request in list(server.running.values()))


async def until(condition, seconds=LONG):
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("count", [1, 2])
def test_one_bad_completion_is_asked_for_again_and_is_the_same(fault, count, tmp_path):
    asked = requests(4, 3)
    quick = {"idle_seconds": 0.3, "retries": 50} if fault == "hang" else {}  # others may seem to hang, again and again
    with fakes(count) as servers, engine_over(servers, tmp_path, **quick) as engine:
        clean = asyncio.run(collect(engine, asked))
        for server in servers:
            server.script += [None, fault]
        given = asyncio.run(collect(engine, asked))
        counts = asyncio.run(engine.health()).detail["replicas"]
    check(asked, given)
    assert given == clean  # the draws belong to the request
    assert counts["retried"] >= count
    assert counts["retried"] == count or fault == "hang"
    assert counts["lost"] == (count if fault in ("short", "nan", "other", "impossible", "spill") else 0)


@pytest.mark.parametrize("fault", ["hang", "break"])
def test_the_tokens_of_a_broken_completion_are_kept(fault, tmp_path):
    """A server whose completions differ each time: beginning again would prefer short completions."""
    asked = requests(1, 1, first=3, max_tokens=6)
    facts, idle = {"batch_invariant": False}, 2.0 if fault == "hang" else 20.0
    with fakes(1, facts=facts) as servers, engine_over(servers, tmp_path, idle_seconds=idle) as engine:
        servers[0].script += [fault]
        given = asyncio.run(collect(engine, asked))
        assert not engine.capabilities.deterministic
    check(asked, given)
    first, second = servers[0].bodies
    assert second["tokens"] == [*first["tokens"], int(given[0].tokens[0])]
    assert second["max_tokens"] == first["max_tokens"] - 1
    assert second["seed"] != first["seed"]  # the server begins its draws again


def test_a_server_that_continues_after_the_stop_token(tmp_path):
    asked = requests(6, 4)
    with fakes(1) as servers, engine_over(servers, tmp_path) as engine:
        clean = asyncio.run(collect(engine, asked))
        servers[0].rates = {"unstopped": 1.0}
        assert asyncio.run(collect(engine, asked)) == clean


def test_a_completion_that_always_fails_ends_the_run_in_one_line(tmp_path):
    with fakes(1) as servers, engine_over(servers, tmp_path, retries=2) as engine:
        servers[0].rates = {"nan": 1.0}
        with pytest.raises(UserError, match=r"prompt 0, sample 0: failed 3 times in a row, .*: a log-prob is nan"):
            asyncio.run(collect(engine, requests(1, 1)))
    assert servers[0].calls["/generate"] == 3


@pytest.mark.parametrize("invariant", [True, False])
def test_failing_hanging_dying_and_coming_back(invariant, tmp_path):
    """Four servers, 5 % of calls failing and 5 % hanging, and one dies with what it runs and comes back."""
    asked = requests(40, 4)
    rates = {"error": 0.05, "hang": 0.05}
    facts = {"batch_invariant": invariant}

    async def go(engine, servers):
        async def die_and_return():
            await until(lambda: servers[0].calls["/generate"] >= 8)
            servers[0].die()
            await until(lambda: sum(server.calls["/generate"] for server in servers) >= 60)
            servers[0].come_back()

        await engine.publish(update(1, WEIGHTS[1]))
        disaster = asyncio.create_task(die_and_return())
        given = await collect(engine, asked)
        await disaster
        await until(lambda: engine._pool.counts["returned"] >= 1)
        again = await collect(engine, requests(40, 4, first=100))
        return given, again, await engine.health()

    with (
        fakes(4, rates=rates, facts=facts, slow=0.001) as servers,
        engine_over(servers, tmp_path, idle_seconds=0.5, max_running=8, retries=50) as engine,
    ):
        given, again, health = asyncio.run(go(engine, servers))
    check(asked, given)
    check(requests(40, 4, first=100), again)
    assert {v for completion in [*given, *again] for v in completion.policy_version.tolist()} == {1}
    assert health.detail["replicas"]["retried"] > 0
    assert health.detail["replicas"]["ejected"] >= 1
    assert servers[0].weights == WEIGHTS[1]
    assert any("is out of service" in line for line in health.detail["events"])


def test_a_server_that_was_started_again_gets_the_newest_weights_first(tmp_path):
    """Without anything running, so that no connection breaks."""

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[0].restart()
        await until(lambda: engine._pool.counts["returned"] == 1)
        return await collect(engine, requests(6, 2))

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        given = asyncio.run(go(engine, servers))
        assert servers[0].weights == WEIGHTS[1]
    check(requests(6, 2), given)
    assert {v for completion in given for v in completion.policy_version.tolist()} == {1}


def test_half_the_servers_on_another_version_are_found_and_brought_back(tmp_path):
    """They load the weights and still say that they have others: nothing that they sample counts."""

    async def go(engine, servers):
        for server in servers[:2]:
            server.forgetful = True
        await engine.publish(update(1, WEIGHTS[1]))
        given = await collect(engine, requests(8, 2))
        await until(lambda: not any(entry.in_service for entry in engine._pool.replicas[:2]))
        for server in servers[:2]:
            server.forgetful = False
        await until(lambda: engine._pool.counts["returned"] >= 2)
        return given, await engine.health()

    with fakes(4) as servers, engine_over(servers, tmp_path) as engine:
        given, health = asyncio.run(go(engine, servers))
    check(requests(8, 2), given)
    assert any("it has weights 'start'" in line for line in health.detail["events"])


def test_a_server_that_takes_no_weights_is_ejected_and_catches_up(tmp_path):
    async def go(engine, servers):
        servers[0].failing = {"/weights"}
        await engine.publish(update(1, WEIGHTS[1]))
        out = await engine.health()
        given = await collect(engine, requests(4, 2))
        await engine.publish(update(2, WEIGHTS[2]))
        servers[0].failing = set()
        await until(lambda: engine._pool.counts["returned"] == 1)
        return out, given, await collect(engine, requests(4, 2))

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        out, first, second = asyncio.run(go(engine, servers))
        assert servers[0].weights == WEIGHTS[2]
    assert [server["in_service"] for server in out.detail["servers"]] == [False, True]
    check(requests(4, 2), first)
    check(requests(4, 2), second)
    assert {v for server in second for v in server.policy_version.tolist()} == {2}


def test_no_server_left_is_one_line(tmp_path):
    with fakes(1) as servers, engine_over(servers, tmp_path, away_seconds=0.1) as engine:
        servers[0].die()
        with pytest.raises(UserError, match="the server is out of service: .*can't be reached; start it again"):
            asyncio.run(collect(engine, requests(1, 1)))
        with pytest.raises(UserError, match="out of service"):
            asyncio.run(engine.publish(update(1, 0.8)))


def test_the_only_server_dies_and_comes_back(tmp_path):
    asked = requests(4, 4)

    async def go(engine, server):
        await engine.publish(update(1, WEIGHTS[1]))
        server.stop_after = 2
        task = asyncio.create_task(collect(engine, asked))
        await until(lambda: server.begun == len(asked) and held(server, 2))
        server.die()
        server.stop_after = None
        await until(lambda: engine._pool.counts["ejected"] == 1)
        server.come_back()
        return await task

    with fakes(1) as servers, engine_over(servers, tmp_path) as engine:
        given = asyncio.run(go(engine, servers[0]))
    check(asked, given)
    assert {v for completion in given for v in completion.policy_version.tolist()} == {1}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"model": "another"}, "its model is another"),
        ({"letters": "gfedcba"}, "it has another tokenizer"),
        ({"log_probs": "raw"}, "its log-prob mode is raw"),
        ({"max_length": 64}, "its longest sequence has 64 tokens"),
        ({"weight_updates": ["other"]}, "it takes no weights by value, and the others do"),
    ],
)
def test_servers_that_differ_are_refused_at_the_start(facts, reason, tmp_path):
    with (
        fakes(1) as good,
        fakes(1, facts=facts) as bad,
        pytest.raises(UserError, match=f"{bad[0].url}: {reason}"),
        engine_over([*good, *bad], tmp_path),
    ):
        pass


@pytest.mark.parametrize(
    ("fact", "value", "reason"),
    [
        ("model", "another", "its model is another"),
        ("weight_updates", ["other"], "it takes no weights by value, and the others do"),
    ],
)
def test_a_server_that_has_become_another_does_not_return(fact, value, reason, tmp_path):
    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        servers[0].die()
        servers[0].facts[fact] = value
        servers[0].come_back()
        await until(lambda: reason in engine._pool.replicas[0].reason)
        return await collect(engine, requests(4, 2))

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        given = asyncio.run(go(engine, servers))
        assert servers[0].weights == 0.5
    check(requests(4, 2), given)


def test_different_weights_at_the_start_are_refused_unless_new_ones_come(tmp_path):
    with fakes(2) as servers:
        servers[1].label = "other"
        with engine_over(servers, tmp_path) as engine:
            with pytest.raises(UserError, match="the servers have different weights"):
                asyncio.run(collect(engine, requests(1, 1)))
            asyncio.run(engine.publish(update(1, WEIGHTS[1])))
            check(requests(2, 2), asyncio.run(collect(engine, requests(2, 2))))


def test_scoring_goes_elsewhere_too(tmp_path):
    asked = [ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4, i]) for i in range(6)]
    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        clean = asyncio.run(engine.score(asked))
        servers[0].failing = {"/score"}
        assert all(np.array_equal(a, b) for a, b in zip(asyncio.run(engine.score(asked)), clean, strict=True))
        servers[1].failing = {"/score"}
        with pytest.raises(UserError, match="scoring: failed 4 times in a row"):
            asyncio.run(engine.score(asked[:1]))


def test_a_caller_that_leaves_ends_its_completions_at_the_server(tmp_path):
    async def go(engine, server):
        server.stop_after = 2
        stream = engine.generate(requests(2, 2))
        task = asyncio.ensure_future(anext(stream))
        await until(lambda: server.begun == 4 and held(server, 2))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        await stream.aclose()
        await until(lambda: not server.running)
        server.stop_after = None
        return await collect(engine, requests(2, 2))

    with fakes(1) as servers, engine_over(servers, tmp_path) as engine:
        check(requests(2, 2), asyncio.run(go(engine, servers[0])))


def test_a_call_that_is_being_closed_can_be_ended(tmp_path, monkeypatch):
    """Its answer was wrong, and while its stream is closed the server is ejected."""
    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        replica, stream, ended = engine._pool.replicas[0], engine._pool.replicas[0].dialect.stream, []

        async def slowly_closed(client, facts, request):
            try:
                async for chunk in stream(client, facts, request):
                    yield chunk
            finally:
                for call in list(replica.running.values()):
                    ended.append(call.timed)
                    call.end("interrupted")

        monkeypatch.setattr(type(replica.dialect), "stream", staticmethod(slowly_closed))
        servers[0].script += ["nan"]
        given = asyncio.run(collect(engine, requests(2, 2)))
    check(requests(2, 2), given)
    assert False in ended
