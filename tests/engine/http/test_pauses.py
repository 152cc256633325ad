"""Pauses and new weights while completions run: each token has the version that sampled it, and its log-prob."""

import asyncio

import numpy as np
import pytest

from proxima.data import UserError
from proxima.engine.local import collect
from tests.engine.http.fake_model import STOP, log_probs, states
from tests.engine.http.plain_dialect import engine_over, expected, fakes, requests, update
from tests.engine.http.test_faulty_servers import check, until

WEIGHTS = {0: 0.5, 1: 0.8, 2: 1.3}
IN_PLACE = {"batch_invariant": False}
ELSEWHERE = IN_PLACE | {"version_spans": False, "weight_version": False}
NO_PAUSE = ELSEWHERE | {"pause_modes": ["abort"], "interrupts": []}


async def begun(engine, servers, asked, tokens=2):
    """What asks for the completions, once all run and wait after so many tokens, or have ended before."""
    for server in servers:
        server.stop_after = tokens
    task = asyncio.create_task(collect(engine, asked))

    def all_wait():
        if sum(server.begun for server in servers) < len(asked):  # read before `running`
            return False
        running = [request for server in servers for request in list(server.running.values())]
        return all(len(request.tokens) == tokens for request in running)

    await until(all_wait)
    return task


def go_on(servers):
    for server in servers:
        server.stop_after = None


@pytest.mark.parametrize("paused", [False, True])
@pytest.mark.parametrize("facts", [IN_PLACE, ELSEWHERE, NO_PAUSE])
def test_recompute_continues_under_the_new_weights(facts, paused, tmp_path):
    asked = requests(5, 3)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        task = await begun(engine, servers, asked)
        if paused:
            await engine.pause()
        await engine.publish(update(2, WEIGHTS[2]))
        if paused:
            go_on(servers)
            so_far = await engine.in_flight()
            await asyncio.sleep(0.02)  # nothing is sampled in a pause
            assert [completion.tokens.tolist() for completion in await engine.in_flight()] == [
                completion.tokens.tolist() for completion in so_far
            ]
            await engine.resume()
        go_on(servers)
        return await task

    with fakes(2, facts=facts) as servers, engine_over(servers, tmp_path) as engine:
        given = asyncio.run(go(engine, servers))
        again = sum(server.calls["/generate"] for server in servers) - len(asked)
    check(asked, given)  # each token by its own weights, with the KV of these weights
    long = [completion for completion in given if len(completion.tokens) > 2]
    assert long
    assert all(completion.policy_version.tolist() == [1, 1] + [2] * (len(completion.tokens) - 2) for completion in long)
    assert again == (0 if facts is IN_PLACE else len(long))


def test_keep_continues_with_the_kv_that_it_has(tmp_path):
    asked = requests(4, 2)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        task = await begun(engine, servers, asked)
        await engine.publish(update(2, WEIGHTS[2]))
        go_on(servers)
        return await task

    with fakes(1, facts=IN_PLACE) as servers, engine_over(servers, tmp_path, interrupt="keep") as engine:
        given = asyncio.run(go(engine, servers))
    long = [(r, completion) for r, completion in zip(asked, given, strict=True) if len(completion.tokens) > 2]
    assert long
    for request, completion in long:
        prompt, tokens = request.prompt.tokens.tolist(), completion.tokens.tolist()
        kv = states(WEIGHTS[1], [*prompt, *tokens[:1]])
        for t in range(2, len(tokens)):
            everything = [*prompt, *tokens[:t]]
            kv = states(WEIGHTS[2], everything, kv)
            assert completion.sampled_log_prob[t] == pytest.approx(
                log_probs(WEIGHTS[2], everything[-1], kv)[tokens[t]], abs=1e-6
            )


@pytest.mark.parametrize("facts", [IN_PLACE, ELSEWHERE, NO_PAUSE])
@pytest.mark.parametrize("paused", [False, True])
def test_finish_ends_what_runs_under_the_weights_before(facts, paused, tmp_path):
    asked = requests(4, 2)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        task = await begun(engine, servers, asked)
        if paused:
            await engine.pause()
        go_on(servers)
        await engine.publish(update(2, WEIGHTS[2]))
        if paused:
            await engine.resume()
        return await task, await collect(engine, asked)

    with fakes(2, facts=facts) as servers, engine_over(servers, tmp_path, interrupt="finish") as engine:
        first, second = asyncio.run(go(engine, servers))
    check(asked, first)
    check(asked, second)
    assert {v for completion in first for v in completion.policy_version.tolist()} == {1}
    assert {v for completion in second for v in completion.policy_version.tolist()} == {2}


@pytest.mark.parametrize("facts", [IN_PLACE, NO_PAUSE])
def test_abort_ends_all_with_the_tokens_that_they_have(facts, tmp_path):
    asked = requests(6, 2)

    async def go(engine, servers):
        task = await begun(engine, servers, asked[:4])
        waiting = asyncio.create_task(collect(engine, asked[4:]))
        await until(lambda: len(engine._pool.router))
        await engine.pause("abort")
        values = [*await task, *await waiting]
        go_on(servers)
        await engine.resume()
        return values, await collect(engine, asked)

    with fakes(1, facts=facts) as servers, engine_over(servers, tmp_path, max_running=4) as engine:
        ended, given = asyncio.run(go(engine, servers))
    assert all(
        completion.finish_reason == "abort" and len(completion.tokens) == 2
        for completion in ended[:4]
        if STOP not in completion.tokens
    )
    assert any(completion.finish_reason == "abort" for completion in ended[:4])
    for request, completion in zip(asked, ended, strict=True):
        np.testing.assert_allclose(completion.sampled_log_prob, expected(request, completion, WEIGHTS), atol=1e-6)
    check(asked, given)


def test_wait_finishes_what_runs_and_admits_nothing(tmp_path):
    asked = requests(6, 2)

    async def go(engine, servers):
        first = await begun(engine, servers, asked[:4])
        second = asyncio.create_task(collect(engine, asked[4:]))
        await until(lambda: len(engine._pool.router))
        go_on(servers)
        await engine.pause("wait")
        assert not await engine.in_flight() or all(completion.key[0] < 2 for completion in await engine.in_flight())
        given = await first
        assert not second.done()
        await engine.resume()
        return [*given, *await second]

    with fakes(1) as servers, engine_over(servers, tmp_path, max_running=4) as engine:
        check(asked, asyncio.run(go(engine, servers)))


def test_abort_of_a_prompt_ends_its_completions_alone(tmp_path):
    asked = requests(3, 2)

    async def go(engine, servers):
        task = await begun(engine, servers, asked)
        await engine.abort(1)
        go_on(servers)
        return await task

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        given = asyncio.run(go(engine, servers))
    assert [completion.finish_reason for completion in given if completion.prompt_uid == 1] == ["abort", "abort"]
    check(asked[:2] + asked[4:], given[:2] + given[4:])


def test_in_flight_tells_what_runs(tmp_path):
    asked = requests(4, 2)

    async def go(engine, servers):
        await engine.publish(update(1, WEIGHTS[1]))
        task = await begun(engine, servers, asked)
        await engine.pause()
        by_key = {entry.key: entry for entry in await engine.in_flight()}
        go_on(servers)
        await engine.resume()
        return by_key, {entry.key: entry for entry in await task}

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        by_key, given = asyncio.run(go(engine, servers))
        assert not asyncio.run(engine.in_flight())
    assert by_key
    prompts = {(r.prompt.uid, r.sample, r.turn): r.prompt.tokens for r in asked}
    for key, entry in by_key.items():
        assert entry.tokens.tolist() == given[key].tokens[: len(entry.tokens)].tolist()
        assert entry.policy_version.tolist() == [1] * len(entry.tokens)
        assert np.array_equal(entry.prompt_tokens, prompts[key])


def test_old_kv_is_never_read(tmp_path):
    """The same prompts under one version after the other, at a server that keeps every prefix."""
    asked = requests(4, 2)
    with fakes(1) as servers, engine_over(servers, tmp_path) as engine:
        for version in (1, 2, 1):
            asyncio.run(engine.publish(update(version, WEIGHTS[version])))
            check(asked, asyncio.run(collect(engine, asked)))
        assert len({body["cache_salt"] for body in servers[0].bodies}) == 3


def test_a_stop_string_across_the_seam_ends_the_completion(tmp_path):
    """The server sees the second half alone."""
    facts = NO_PAUSE | {"batch_invariant": True}
    plain = requests(8, 4, max_tokens=10)
    with fakes(1, facts=facts) as servers, engine_over(servers, tmp_path) as engine:
        clean = asyncio.run(collect(engine, plain))
    completion, at = next(
        (r, c) for r, c in zip(plain, clean, strict=True) if len(c.tokens) > 6 and STOP not in c.tokens[:6]
    )
    stop = at.text[1:3]
    asked = [r for r in requests(8, 4, max_tokens=10, stop=(stop,)) if (r.prompt.uid, r.sample) == at.key[:2]]

    async def go(engine, servers):
        task = await begun(engine, servers, asked)  # after the first half of the stop string
        await engine.pause()
        # the draws after the seam are others: choose what the server gives, so that the string is completed there
        engine._pool.replicas[0].dialect = Spoken(at.tokens[2:4].tolist(), completion.prompt.tokens)
        go_on(servers)
        await engine.resume()
        return await task

    with fakes(1, facts=facts) as servers, engine_over(servers, tmp_path) as engine:
        (given,) = asyncio.run(go(engine, servers))
    assert given.tokens.tolist() == at.tokens[:3].tolist()
    assert given.finish_reason == "stop"
    assert given.text == at.text[:1]


class Spoken:
    """A dialect whose next completion is given, and that knows no stop string."""

    def __init__(self, tokens, prompt):
        self.tokens = tokens

    def __getattr__(self, name):
        from tests.engine.http.plain_dialect import PlainDialect

        return getattr(PlainDialect(), name)

    async def stream(self, client, facts, request):
        from proxima.engine.http import Chunk

        yield Chunk(tokens=self.tokens, log_prob=[-1.0] * len(self.tokens))


def test_a_completion_that_is_asked_again_in_a_pause_waits_for_its_end(tmp_path):
    asked = requests(2, 2)

    async def go(engine, server):
        task = await begun(engine, [server], asked)
        await engine.pause()
        server.restart()
        await until(lambda: engine._pool.counts["returned"] == 1)
        calls = server.calls["/generate"]
        server.stop_after = None
        await asyncio.sleep(0.02)
        assert server.calls["/generate"] == calls
        await engine.resume()
        return await task

    with fakes(1) as servers, engine_over(servers, tmp_path) as engine:
        check(asked, asyncio.run(go(engine, servers[0])))


def test_raw_log_probs_are_refused_at_another_temperature(tmp_path):
    with fakes(1, facts={"log_probs": "raw"}) as servers, engine_over(servers, tmp_path) as engine:
        with pytest.raises(UserError, match="temperature=0.7, and the server reports log-probs of temperature 1"):
            asyncio.run(collect(engine, requests(1, 1, temperature=0.7)))
        check(requests(2, 2), asyncio.run(collect(engine, requests(2, 2))))


def test_truncated_log_probs_have_their_names(tmp_path):
    asked = requests(4, 3, top_k=3)
    with fakes(1) as servers, engine_over(servers, tmp_path) as engine:
        given = asyncio.run(collect(engine, asked))
    with fakes(1, facts={"scores": False}) as servers, engine_over(servers, tmp_path) as engine:
        unscored = asyncio.run(collect(engine, asked))
    with fakes(1, facts={"log_probs": "raw"}) as servers, engine_over(servers, tmp_path) as engine:
        raw = asyncio.run(collect(engine, asked))
    for request, completion, other, third in zip(asked, given, unscored, raw, strict=True):
        full = expected(request, completion, WEIGHTS)
        np.testing.assert_allclose(completion.untruncated_log_prob, full, atol=1e-5)
        assert (completion.sampled_log_prob > completion.untruncated_log_prob).all()
        assert np.array_equal(other.sampled_log_prob, completion.sampled_log_prob)
        assert np.isnan(other.untruncated_log_prob).all()
        np.testing.assert_allclose(third.untruncated_log_prob, expected(request, third, WEIGHTS), atol=1e-5)
        assert np.isnan(third.sampled_log_prob).all()
