"""The tokens that could be sampled, from fakes that tell them: joined over chunks, attempts and weights; a set without
its token costs the attempt, never a gradient."""

import asyncio
import contextlib
from dataclasses import dataclass, replace

import numpy as np
import pytest

from proxima.data import SamplingMask
from proxima.engine.http import HttpEngine
from proxima.engine.http.answer_checks import WrongAnswerError, mask_of
from proxima.engine.http.dialect import Chunk
from proxima.engine.local import collect
from tests.engine.http.fake_model import log_probs, states, truncated
from tests.engine.http.plain_dialect import Plain, PlainDialect, PlainSync, fakes, requests, rules, update

TOP_K = 3
WEIGHTS = {0: 0.5, 1: 0.8}


def sets_of(weights, before, tokens, temperature):
    """By the formula: what top-k left at each of the tokens."""
    collected, everything = [], list(before)
    for own, token in zip(weights, tokens, strict=True):
        left = truncated(log_probs(own, everything[-1], states(own, everything), temperature), TOP_K)
        collected.append(np.flatnonzero(np.isfinite(left)).tolist())
        everything.append(token)
    return collected


class MaskedDialect(PlainDialect):
    """A server that tells them; `spoiled` answers get a set that lacks its token."""

    def __init__(self, servers, spoiled=0):
        self.servers, self.spoiled, self.asked = {server.url: server for server in servers}, spoiled, []

    async def stream(self, client, facts, request):
        self.asked.append(request.sampling_mask)
        server, everything = self.servers[client.url], list(request.tokens)
        async for chunk in super().stream(client, facts, request):
            tokens, temperature = chunk.tokens.tolist(), request.sampling.temperature
            sets = sets_of([server.weights] * len(tokens), everything, tokens, temperature)
            everything += tokens
            if self.spoiled and tokens:
                self.spoiled -= 1
                sets[0] = [token for token in range(7) if token != tokens[0]]
            yield replace(chunk, sampling_mask=SamplingMask.of_sets(sets)) if request.sampling_mask else chunk


@dataclass(frozen=True, kw_only=True)
class Masked(Plain):
    talk: MaskedDialect
    sampling_mask: bool = True

    def dialect(self):
        return self.talk


@contextlib.contextmanager
def engine_over(servers, folder, spoiled=0, **settings):
    talk = MaskedDialect(servers, spoiled)
    spec = Masked(url=tuple(server.url for server in servers), talk=talk, **settings)
    engine = HttpEngine(spec, rules(), PlainSync(spec, folder))
    try:
        yield engine, talk
    finally:
        engine.close()


def check(asked, given):
    for request, completion in zip(asked, given, strict=True):
        weights = [WEIGHTS[version] for version in completion.policy_version.tolist()]
        expected = sets_of(weights, request.prompt.tokens.tolist(), completion.tokens.tolist(), completion.temperature)
        assert completion.sampling_mask == SamplingMask.of_sets(expected)
        assert np.isfinite(completion.sampled_log_prob).all()


def test_each_token_has_the_set_that_it_was_drawn_from(tmp_path):
    asked = requests(4, 3, top_k=TOP_K, temperature=0.8)
    with fakes(2, facts={"sampling_mask": True}) as servers, engine_over(servers, tmp_path) as (engine, _):
        assert engine.capabilities.sampling_mask
        check(asked, asyncio.run(collect(engine, asked)))


def test_they_are_asked_for_only_where_something_is_truncated(tmp_path):
    asked = [
        *requests(1, 2),
        *requests(1, 2, first=1, top_k=TOP_K),
        *requests(1, 1, first=2, top_k=TOP_K, temperature=0.0),
    ]
    with fakes(1, facts={"sampling_mask": True}) as servers, engine_over(servers, tmp_path) as (engine, talk):
        given = asyncio.run(collect(engine, asked))
    assert [completion.sampling_mask is not None for completion in given] == [False, False, True, True, False]
    assert sorted(talk.asked) == [False, False, False, True, True]


def test_a_server_that_lacks_them_is_not_asked(tmp_path):
    with fakes(1) as servers, engine_over(servers, tmp_path) as (engine, talk):
        assert not engine.capabilities.sampling_mask
        (completion,) = asyncio.run(collect(engine, requests(1, 1, top_k=TOP_K)))
    assert completion.sampling_mask is None and talk.asked == [False]


@pytest.mark.parametrize("spoiled", [1, 2])
def test_a_set_without_its_token_is_tried_again_and_not_used(spoiled, tmp_path):
    asked = requests(2, 2, top_k=TOP_K)
    with fakes(2, facts={"sampling_mask": True}) as servers, engine_over(servers, tmp_path, spoiled) as (engine, talk):
        check(asked, asyncio.run(collect(engine, asked)))
    assert len(talk.asked) == len(asked) + spoiled


@pytest.mark.parametrize(
    ("tokens", "message"),
    [([7, 2, 5], None), ([7, 2, 4], "token 2, id 4, is not in its set of 2"), ([7, 2], "3 sampling masks of 2 tokens")],
)
def test_each_token_is_looked_for_in_its_own_set(tokens, message):
    mask = SamplingMask.of_sets([[7], [4, 2, 1], [9, 5]])
    chunk = Chunk(tokens=np.array(tokens), log_prob=np.zeros(len(tokens)), sampling_mask=mask)
    if message is None:
        assert mask_of(chunk) is mask
    else:
        with pytest.raises(WrongAnswerError, match=message):
            mask_of(chunk)


def test_sets_over_a_change_of_weights_are_of_the_weights_that_sampled(tmp_path):
    asked = requests(2, 2, top_k=TOP_K, max_tokens=20)

    async def go(engine, server):
        server.stop_after = 4
        task = asyncio.create_task(collect(engine, asked))
        while sum(len(completion.tokens) for completion in await engine.in_flight()) < 4:
            await asyncio.sleep(0.001)
        await engine.pause()
        await engine.publish(update(1, WEIGHTS[1]))
        server.stop_after = None
        await engine.resume()
        return await task

    with fakes(1, facts={"sampling_mask": True}) as servers, engine_over(servers, tmp_path) as (engine, _):
        given = asyncio.run(go(engine, servers[0]))
    check(asked, given)
    assert {version for completion in given for version in completion.policy_version.tolist()} == {0, 1}
