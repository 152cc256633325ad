"""Pauses and new weights while completions run: each token has the version that sampled it, and its log-prob."""

import asyncio

import numpy as np
import pytest

from proxima.data import UserError
from proxima.engine.http.dialect import Chunk
from proxima.engine.http.weights.stream import OutdatedError
from proxima.engine.local.local_engine import collect
from tests.engine.http.fake_model import STOP, log_probs, states
from tests.engine.http.plain_servers import (
    ELSEWHERE,
    IN_PLACE,
    WEIGHTS,
    PlainDialect,
    begun,
    check,
    expected,
    go_on,
    requests,
    update,
)
from tests.processes import until

PAUSED = [(IN_PLACE, True), (IN_PLACE, False), (ELSEWHERE, False), (ELSEWHERE, True)]


@pytest.mark.slow
@pytest.mark.parametrize(("facts", "paused"), PAUSED)
async def test_recompute_continues_under_the_new_weights(facts, paused, fleet):
    asked = requests(5, 3)
    engine, servers = fleet(2, facts=facts, published=True)
    task = await begun(engine, servers, asked)
    if paused:
        await engine.pause()
    await engine.publish(update(2))
    if paused:
        go_on(servers)
        so_far = await engine.in_flight()
        await asyncio.sleep(0.02)  # nothing is sampled in a pause
        assert [completion.tokens.tolist() for completion in await engine.in_flight()] == [
            completion.tokens.tolist() for completion in so_far
        ]
        await engine.resume()
    go_on(servers)
    given = await task
    again = sum(server.calls["/generate"] for server in servers) - len(asked)
    check(asked, given)  # each token by its own weights, with the KV of these weights
    long = [completion for completion in given if len(completion.tokens) > 2]
    assert long
    assert all(completion.policy_version.tolist() == [1, 1] + [2] * (len(completion.tokens) - 2) for completion in long)
    assert again == (0 if facts is IN_PLACE else len(long))


async def test_keep_continues_with_the_kv_that_it_has(fleet):
    asked = requests(4, 2)
    engine, servers = fleet(facts=IN_PLACE, interrupt="keep", published=True)
    task = await begun(engine, servers, asked)
    await engine.publish(update(2))
    go_on(servers)
    given = await task
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


async def test_completions_go_on_while_new_weights_are_staged(fleet):
    asked = requests(4, 2)
    engine, servers = fleet(2, facts=IN_PLACE, published=True)
    task, new = await begun(engine, servers, asked), update(2)
    await engine.stage(new)
    assert all(server.label.endswith("v1") for server in servers)
    go_on(servers)
    check(asked, await task, 1)
    labels = (await engine.health()).detail["sync"]
    await engine.publish(new)
    assert all(server.label.endswith("v2") for server in servers) and labels
    check(asked, await collect(engine, asked), 2)


async def test_a_server_that_returns_before_staged_weights_are_published_gets_the_former(fleet):
    asked = requests(4, 2)
    engine, servers = fleet(2, facts=IN_PLACE, published=True, health_seconds=0.01)
    new = update(2)
    await engine.stage(new)
    servers[0].restart()
    await until(lambda: engine._pool.counts["returned"] == 1)
    check(asked, await collect(engine, asked), 1)
    await engine.publish(new)
    check(asked, await collect(engine, asked), 2)


async def test_no_pause_waits_for_servers_that_would_load_the_former_weights(fleet):
    """One goes on loading while new ones are staged, and is interrupted when they are published; the other waits for
    its turn, which comes after the new ones."""
    asked, released = requests(4, 2), asyncio.Event()
    engine, servers = fleet(3, facts=IN_PLACE, published=True, health_seconds=0.01)
    *away, serves = servers
    keeper, new = engine._keeper, update(2)
    asked_before = [server.calls["/tokenize"] for server in away]  # the last question before it waits for its turn
    for replica, server in zip(engine._pool.replicas, away, strict=False):
        replica.dialect = Loads(released)
        server.restart()
    await until(
        lambda: keeper._loading and all(s.calls["/tokenize"] > n for s, n in zip(away, asked_before, strict=True))
    )
    (loading,) = keeper._loading
    await engine.stage(new)
    assert list(keeper._loading) == [loading]
    await engine.pause()
    await asyncio.wait_for(engine.publish(new), 20)
    assert serves.label.endswith("v2") and {server.label for server in away} == {"start"}
    await engine.resume()
    released.set()
    await until(lambda: engine._pool.counts["returned"] == 2)
    assert all(server.label.endswith("v2") for server in away)
    check(asked, await collect(engine, asked), 2)


async def test_one_that_leaves_while_it_is_being_held_gives_its_completions_back(fleet):
    asked = requests(4, 2)
    engine, servers = fleet(2, facts=IN_PLACE, published=True)
    task = await begun(engine, servers, asked)
    leaver = engine._pool.replicas[0]
    leaver.dialect = Leaves(lambda: engine._pool.remove(leaver, "it is not listed any more"))
    await engine.publish(update(2))
    go_on(servers)
    check(asked, await asyncio.wait_for(task, 20))


class Leaves(PlainDialect):
    """A dialect whose server leaves at the moment when it is paused."""

    def __init__(self, leave):
        self.leave = leave

    async def pause(self, client, facts, mode):
        await super().pause(client, facts, mode)
        self.leave()


@pytest.mark.parametrize("others", [0, 1])
async def test_one_that_returns_during_an_update_is_in_service_with_the_next_weights(others, fleet):
    """Its transport has no copies, and the trainer is changing the weights; also if it is the only server."""
    asked = requests(4, 2)
    engine, servers = fleet(1 + others, facts=IN_PLACE, published=True, health_seconds=0.01)
    sync, push, tried = engine._keeper.sync, engine._keeper.sync.push, []

    async def push_outdated(replica, push_round=None):
        tried.append(replica)
        raise OutdatedError("", "", "the weights are being trained")

    sync.push = push_outdated
    servers[0].restart()
    await until(lambda: len(tried) > 1)
    assert servers[0].label == "start" and engine._pool.counts["returned"] == 0
    server = servers[0]

    async def push_slowly(replica, push_round=None):
        before = server.calls["/facts"]
        if not replica.in_service:
            await asyncio.sleep(0.1)
            assert server.calls["/facts"] == before  # nobody resumes it meanwhile, to ask whether it can return
        return await push(replica, push_round)

    sync.push = push_slowly
    await engine.publish(update(2))
    assert engine._pool.counts["returned"] == 1 and all(server.label.endswith("v2") for server in servers)
    check(asked, await collect(engine, asked), 2)


class Loads(PlainDialect):
    """A dialect whose servers load no weights until `released`."""

    def __init__(self, released):
        self.released = released

    async def load_folder(self, client, facts, weights):
        while not self.released.is_set():  # it is set in another event loop
            await asyncio.sleep(0.001)
        await super().load_folder(client, facts, weights)


@pytest.mark.slow
@pytest.mark.parametrize(("facts", "paused"), PAUSED[::3])
async def test_finish_ends_what_runs_under_the_weights_before(facts, paused, fleet):
    asked = requests(4, 2)
    engine, servers = fleet(2, facts=facts, interrupt="finish", published=True)
    task = await begun(engine, servers, asked)
    if paused:
        await engine.pause()
    go_on(servers)
    await engine.publish(update(2))
    if paused:
        await engine.resume()
    check(asked, await task, 1)
    check(asked, await collect(engine, asked), 2)


@pytest.mark.parametrize("facts", [IN_PLACE, ELSEWHERE])
async def test_abort_ends_all_with_the_tokens_that_they_have(facts, fleet):
    asked = requests(6, 2)
    engine, servers = fleet(facts=facts, max_running=4)
    task = await begun(engine, servers, asked[:4])
    waiting = asyncio.create_task(collect(engine, asked[4:]))
    await until(lambda: len(engine._pool.router))
    await engine.pause("abort")
    ended = [*await task, *await waiting]
    go_on(servers)
    await engine.resume()
    assert all(
        completion.finish_reason == "abort" and len(completion.tokens) == 2
        for completion in ended[:4]
        if STOP not in completion.tokens
    )
    assert any(completion.finish_reason == "abort" for completion in ended[:4])
    for request, completion in zip(asked, ended, strict=True):
        np.testing.assert_allclose(completion.sampled_log_prob, expected(request, completion), atol=1e-6)
    check(asked, await collect(engine, asked))


async def test_wait_finishes_what_runs_and_admits_nothing(fleet):
    asked = requests(6, 2)
    engine, servers = fleet(max_running=4)
    first = await begun(engine, servers, asked[:4])
    second = asyncio.create_task(collect(engine, asked[4:]))
    await until(lambda: len(engine._pool.router))
    go_on(servers)
    await engine.pause("wait")
    assert all(completion.key[0] < 2 for completion in await engine.in_flight())
    given = await first
    assert not second.done()
    await engine.resume()
    check(asked, [*given, *await second])


async def test_abort_of_a_prompt_ends_its_completions_alone(fleet):
    asked = requests(3, 2)
    engine, servers = fleet(2)
    task = await begun(engine, servers, asked)
    await engine.abort(1)
    go_on(servers)
    given = await task
    assert [completion.finish_reason for completion in given if completion.prompt_uid == 1] == ["abort", "abort"]
    check(asked[:2] + asked[4:], given[:2] + given[4:])


@pytest.mark.slow
async def test_old_kv_is_never_read(fleet):
    """The same prompts under one version after the other, at a server that keeps every prefix."""
    asked = requests(4, 2)
    engine, (server,) = fleet()
    for version in (1, 2, 1):
        await engine.publish(update(version))
        check(asked, await collect(engine, asked))
    assert len({request.cache_salt for request in server.requests}) == 3


@pytest.mark.slow
async def test_a_stop_string_across_the_seam_ends_the_completion(fleet):
    """The server sees the second half alone."""
    facts = ELSEWHERE | {"batch_invariant": True}
    plain = requests(8, 4, max_tokens=10)
    engine, servers = fleet(facts=facts)
    clean = await collect(engine, plain)
    at = next(completion for completion in clean if len(completion.tokens) > 6 and STOP not in completion.tokens[:6])
    asked = [r for r in requests(8, 4, max_tokens=10, stop=(at.text[1:3],)) if (r.prompt.uid, r.sample) == at.key[:2]]
    servers[0].begun = 0
    task = await begun(engine, servers, asked)  # after the first half of the stop string
    await engine.pause()
    # the draws after the seam are others: choose what the server gives, so that the string is completed there
    spoken = engine._pool.replicas[0].dialect = Spoken(at.tokens[2:4].tolist())
    go_on(servers)
    await engine.resume()
    (given,) = await task
    assert given.tokens.tolist() == at.tokens[:3].tolist()
    assert given.finish_reason == "stop"
    assert given.text == at.text[:3]
    assert spoken.more == 0  # the stream was closed


class Spoken(PlainDialect):
    """A dialect whose next completion begins as given, and that knows no stop string."""

    def __init__(self, tokens):
        self.tokens, self.more = tokens, 0

    async def stream(self, client, facts, request):
        yield Chunk(tokens=self.tokens, log_prob=[-1.0] * len(self.tokens))
        while True:
            self.more += 1
            yield Chunk(tokens=[0], log_prob=[-1.0])


@pytest.mark.slow
async def test_a_completion_that_is_asked_again_in_a_pause_waits_for_its_end(fleet):
    asked = requests(2, 2)
    engine, (server,) = fleet()
    task = await begun(engine, [server], asked)
    await engine.pause()
    server.restart()
    await until(lambda: len(engine._pool.router) and not engine._pool.replicas[0].running)
    calls = server.calls["/generate"]
    go_on([server])
    await asyncio.sleep(0.02)
    assert server.calls["/generate"] == calls
    await engine.resume()
    check(asked, await task)


async def test_raw_log_probs_are_refused_at_another_temperature(fleet):
    engine, _ = fleet(facts={"log_probs": "raw"})
    with pytest.raises(UserError, match="temperature=0.7, and the server reports log-probs of temperature 1"):
        await collect(engine, requests(1, 1, temperature=0.7))
    check(requests(2, 2), await collect(engine, requests(2, 2)))


@pytest.mark.slow
async def test_truncated_log_probs_have_their_names(fleet):
    asked = requests(4, 3, top_k=3)
    given, unscored, raw = [
        await collect(fleet(**settings)[0], asked)
        for settings in ({}, {"untruncated": "absent"}, {"facts": {"log_probs": "raw"}})
    ]
    for request, completion, other, third in zip(asked, given, unscored, raw, strict=True):
        np.testing.assert_allclose(completion.untruncated_log_prob, expected(request, completion), atol=1e-5)
        assert (completion.sampled_log_prob > completion.untruncated_log_prob).all()
        assert np.array_equal(other.sampled_log_prob, completion.sampled_log_prob)
        assert np.isnan(other.untruncated_log_prob).all()
        np.testing.assert_allclose(third.untruncated_log_prob, expected(request, third), atol=1e-5)
        assert np.isnan(third.sampled_log_prob).all()
