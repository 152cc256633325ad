"""The experts of each token, from fakes that tell them: joined over attempts and weights. An answer that lacks them
costs the attempt; an attempt that was cut off gives -1."""

import asyncio
import contextlib
from dataclasses import dataclass, replace

import numpy as np
import pytest

from proxima.data import FieldError, Trajectory, UserError
from proxima.engine.http import HttpEngine
from proxima.engine.http.route_rows import RouteShape
from proxima.engine.http.server_checks import check_facts
from proxima.engine.local import collect
from proxima.engine.protocol import EngineRequirements
from tests.engine.http.plain_dialect import Plain, PlainDialect, PlainSync, fakes, requests, rules, update

SHAPE = RouteShape(layers=3, mixtures=(0, 2), experts=64, per_token=2)
FACTS = {"routed_experts": True}


def rows_of(fed, weights):
    """[N, 2, 2] by a formula: token and place say the expert, and the weights say another."""
    first = np.array([[[(3 * token + at + mixture) % 64] for mixture in (0, 1)] for at, token in enumerate(fed)])
    return np.concatenate([first, (first + 1 + round(10 * weights)) % 64], -1).astype(np.int8)


class RoutedDialect(PlainDialect):
    """A server that tells them with the end of a completion; the next `silent` ends come without."""

    def __init__(self, servers, silent=0):
        self.servers, self.silent, self.asked = {server.url: server for server in servers}, silent, []

    async def stream(self, client, facts, request):
        self.asked.append(request.routes)
        server, fed = self.servers[client.url], list(request.tokens)
        rows = rows_of(fed[:-1], server.weights)
        async for chunk in super().stream(client, facts, request):
            for token in chunk.tokens.tolist():
                rows = np.concatenate([rows, rows_of(fed, server.weights)[-1:]])
                fed.append(token)
            if chunk.finish_reason is None or request.routes is None:
                yield chunk
            elif self.silent:
                self.silent -= 1
                yield chunk
            else:
                yield replace(chunk, routes=rows)


@dataclass(frozen=True, kw_only=True)
class Routed(Plain):
    talk: RoutedDialect | None = None
    routed_experts: bool = True

    def dialect(self):
        return self.talk


@contextlib.contextmanager
def engine_over(servers, folder, silent=0, **settings):
    talk = RoutedDialect(servers, silent)
    spec = Routed(url=tuple(server.url for server in servers), talk=talk, **settings)
    engine = HttpEngine(spec, rules(routes=SHAPE), PlainSync(spec, folder))
    try:
        yield engine, talk
    finally:
        engine.close()


def check(asked, given, weights=(0.5,), latest=False):
    for request, completion in zip(asked, given, strict=True):
        prompt, versions = request.prompt.tokens.tolist(), completion.policy_version
        fed = [*prompt, *completion.tokens.tolist()[:-1]]
        each = [rows_of(fed, own)[len(prompt) - 1 :] for own in weights]
        expected = np.stack([each[version][t] for t, version in enumerate(versions)])
        if latest:
            expected[versions != versions[-1]] = -1
        assert np.array_equal(completion.routed_experts, expected) and completion.routed_experts.dtype == np.int8
        assert len(completion.prompt_routed_experts) == len(prompt)
        Trajectory.of(request.prompt, completion, group=0, advantage=0, routes=True)


def test_each_token_has_the_experts_of_the_position_that_predicted_it(tmp_path):
    asked = requests(4, 3)
    with fakes(2, facts=FACTS) as servers, engine_over(servers, tmp_path) as (engine, talk):
        given = asyncio.run(collect(engine, asked))
    check(asked, given)
    assert set(talk.asked) == {SHAPE}
    for request, completion in zip(asked, given, strict=True):
        assert np.array_equal(completion.prompt_routed_experts, rows_of(request.prompt.tokens.tolist(), 0.5))


def test_without_the_field_they_are_not_asked_for(tmp_path):
    with fakes(1, facts=FACTS) as servers, engine_over(servers, tmp_path, routed_experts=False) as (engine, talk):
        (completion,) = asyncio.run(collect(engine, requests(1, 1)))
    assert completion.routed_experts is completion.prompt_routed_experts is None and talk.asked == [None]


@pytest.mark.parametrize("silent", [1, 2])
def test_an_end_without_them_is_tried_again_and_not_used(silent, tmp_path):
    asked = requests(2, 2)
    with fakes(2, facts=FACTS) as servers, engine_over(servers, tmp_path, silent) as (engine, talk):
        check(asked, asyncio.run(collect(engine, asked)))
    assert len(talk.asked) == len(asked) + silent


def test_a_server_that_never_gives_them_ends_the_run(tmp_path):
    message = "routed experts of 0 tokens, where [0-9]+ were fed"
    with (
        fakes(1, facts=FACTS) as servers,
        engine_over(servers, tmp_path, 10**6) as (engine, _),
        pytest.raises(UserError, match=message),
    ):
        asyncio.run(collect(engine, requests(1, 1)))


async def across_new_weights(engine, server, asked):
    server.stop_after = 4
    task = asyncio.create_task(collect(engine, asked))
    while sum(len(completion.tokens) for completion in await engine.in_flight()) < 4:
        await asyncio.sleep(0.001)
    await engine.pause()
    await engine.publish(update(1, 0.8))
    server.stop_after = None
    await engine.resume()
    return await task


@pytest.mark.parametrize("latest", [False, True])
def test_a_token_keeps_those_of_the_weights_that_sampled_it(latest, tmp_path):
    """Of a server that tells those of the newest weights for all tokens, the earlier ones have none."""
    asked, facts = requests(2, 2, max_tokens=20, seed=3), FACTS | {"latest_routes": latest}
    with fakes(1, facts=facts) as servers, engine_over(servers, tmp_path) as (engine, talk):
        given = asyncio.run(across_new_weights(engine, servers[0], asked))
    check(asked, given, (0.5, 0.8), latest)
    assert len(talk.asked) == len(asked)
    assert {version for completion in given for version in completion.policy_version.tolist()} == {0, 1}


def test_what_was_cut_off_has_none_and_the_rest_has_its_own(tmp_path):
    """The server can't go on by itself: its requests are ended and sent again, with what they have."""
    asked, facts = requests(2, 2, max_tokens=20, seed=3), FACTS | {"interrupts": []}
    with fakes(1, facts=facts) as servers, engine_over(servers, tmp_path) as (engine, talk):
        talk_ends = RoutedDialect.stream

        async def silent_aborts(self, client, facts, request):
            async for chunk in talk_ends(self, client, facts, request):
                yield replace(chunk, routes=None) if chunk.finish_reason == "abort" else chunk

        talk.stream = silent_aborts.__get__(talk)
        given = asyncio.run(across_new_weights(engine, servers[0], asked))
    check(asked, given, (0.5, 0.8), latest=True)
    assert len(talk.asked) > len(asked)


def test_a_server_without_them_is_refused_at_the_start(tmp_path):
    with fakes(1) as servers, engine_over(servers, tmp_path) as (engine, _):
        needs = EngineRequirements(model_path="", tokenizer=None, vocabulary=8, max_length=100)
        with pytest.raises(FieldError, match="routed_experts=True .* does not report which experts it chose") as raised:
            check_facts(engine.spec, engine.facts, needs, servers[0].url)
        assert "--enable-return-routed-experts" in str(raised.value)
