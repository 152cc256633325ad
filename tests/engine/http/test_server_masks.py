"""The tokens that could be sampled, from fakes that tell them: joined over chunks, attempts and weights; a set without
its token costs the attempt, never a gradient."""

import numpy as np
import pytest

from proxima.data.columns import SamplingMask
from proxima.engine.http.answer_checks import WrongAnswerError, mask_of
from proxima.engine.http.dialect import Chunk
from proxima.engine.local.local_engine import collect
from tests.engine.http.fake_model import log_probs, states, truncated
from tests.engine.http.plain_servers import WEIGHTS, across_new_weights, requests, versions

TOP_K = 3
FACTS = {"sampling_mask": True}


def sets_of(weights, before, tokens, temperature):
    """By the formula: what top-k left at each of the tokens."""
    collected, everything = [], list(before)
    for own, token in zip(weights, tokens, strict=True):
        left = truncated(log_probs(own, everything[-1], states(own, everything), temperature), TOP_K)
        collected.append(np.flatnonzero(np.isfinite(left)).tolist())
        everything.append(token)
    return collected


@pytest.fixture
def masked(fleet):
    """`masked(count)`: an engine and its servers."""
    return lambda count=1, facts=FACTS: fleet(count, facts=facts, sampling_mask=True)


def masks_asked(servers):
    return [request.sampling_mask for server in servers for request in server.requests]


def check(asked, given):
    for request, completion in zip(asked, given, strict=True):
        weights = [WEIGHTS[version] for version in completion.policy_version.tolist()]
        expected = sets_of(weights, request.prompt.tokens.tolist(), completion.tokens.tolist(), completion.temperature)
        assert completion.sampling_mask == SamplingMask.of_sets(expected)
        assert np.isfinite(completion.sampled_log_prob).all()


async def test_they_are_asked_for_only_where_something_is_truncated(masked):
    asked = [
        *requests(1, 2),
        *requests(1, 2, first=1, top_k=TOP_K),
        *requests(1, 1, first=2, top_k=TOP_K, temperature=0.0),
    ]
    engine, servers = masked()
    given = await collect(engine, asked)
    assert [completion.sampling_mask is not None for completion in given] == [False, False, True, True, False]
    assert sorted(masks_asked(servers)) == [False, False, False, True, True]


async def test_a_server_that_lacks_them_is_not_asked(masked):
    engine, servers = masked(facts={})
    assert not engine.capabilities.sampling_mask
    (completion,) = await collect(engine, requests(1, 1, top_k=TOP_K))
    assert completion.sampling_mask is None and masks_asked(servers) == [False]


async def test_a_set_without_its_token_is_tried_again_and_not_used(masked):
    asked = requests(2, 2, top_k=TOP_K)
    engine, servers = masked(2)
    for server in servers:
        server.script += ["unmasked"]
    check(asked, await collect(engine, asked))
    assert len(masks_asked(servers)) == len(asked) + 2


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


@pytest.mark.slow
async def test_sets_over_a_change_of_weights_are_of_the_weights_that_sampled(masked):
    asked = requests(4, 3, top_k=TOP_K, temperature=0.8, max_tokens=20)
    engine, servers = masked(2)
    assert engine.capabilities.sampling_mask
    given = await across_new_weights(engine, servers, asked)
    check(asked, given)
    assert versions(given) == {0, 1}
