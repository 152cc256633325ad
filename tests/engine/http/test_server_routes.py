"""The experts of each token, from fakes that tell them: joined over attempts and weights. An answer that lacks them
costs the attempt; an attempt that was cut off gives -1."""

import numpy as np
import pytest

from proxima.data import FieldError, UserError
from proxima.data.trajectory import Trajectory
from proxima.engine.http.answer_values import RouteShape
from proxima.engine.http.server_checks import check_facts
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import EngineRequirements
from tests.engine.helpers import unloaded
from tests.engine.http.fake_model import rows_of
from tests.engine.http.plain_servers import across_new_weights, requests, versions

SHAPE = RouteShape(layers=3, mixtures=(0, 2), experts=64, per_token=2)
FACTS = {"routed_experts": True}


@pytest.fixture
def routed(fleet):
    """`routed(count, facts)`: an engine and its servers."""

    def start(count=1, facts=FACTS, wanted=True):
        return fleet(count, facts=facts, routes=SHAPE, routed_experts=wanted)

    return start


def shapes_asked(servers):
    return [request.routes for server in servers for request in server.requests]


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


async def test_each_token_has_the_experts_of_the_position_that_predicted_it(routed):
    asked = requests(4, 3)
    engine, servers = routed(2)
    given = await collect(engine, asked)
    check(asked, given)
    assert set(shapes_asked(servers)) == {SHAPE}
    for request, completion in zip(asked, given, strict=True):
        assert np.array_equal(completion.prompt_routed_experts, rows_of(request.prompt.tokens.tolist(), 0.5))


async def test_without_the_field_they_are_not_asked_for(routed):
    engine, servers = routed(wanted=False)
    (completion,) = await collect(engine, requests(1, 1))
    assert completion.routed_experts is completion.prompt_routed_experts is None and shapes_asked(servers) == [None]


async def test_an_end_without_them_is_tried_again_and_not_used(routed):
    asked = requests(2, 2)
    engine, servers = routed(2)
    for server in servers:
        server.script += ["silent"]
    check(asked, await collect(engine, asked))
    assert len(shapes_asked(servers)) == len(asked) + 2


async def test_a_server_that_never_gives_them_ends_the_run(routed):
    engine, (server,) = routed()
    server.rates = {"silent": 1.0}
    with pytest.raises(UserError, match="routed experts of 0 tokens, where [0-9]+ were fed"):
        await collect(engine, requests(1, 1))


@pytest.mark.slow
@pytest.mark.parametrize("latest", [False, True])
async def test_a_token_keeps_those_of_the_weights_that_sampled_it(latest, routed):
    """Of a server that tells those of the newest weights for all tokens, the earlier ones have none."""
    asked = requests(2, 2, max_tokens=20, seed=3)
    engine, servers = routed(facts=FACTS | {"latest_routes": latest})
    given = await across_new_weights(engine, servers, asked)
    check(asked, given, (0.5, 0.8), latest)
    assert len(shapes_asked(servers)) == len(asked)
    assert versions(given) == {0, 1}


async def test_what_was_cut_off_has_none_and_the_rest_has_its_own(routed):
    """The server can't go on by itself: its requests are ended and sent again, with what they have."""
    asked = requests(2, 2, max_tokens=20, seed=3)
    engine, servers = routed(facts=FACTS | {"version_spans": False})
    servers[0].silent_aborts = True
    given = await across_new_weights(engine, servers, asked)
    check(asked, given, (0.5, 0.8), latest=True)
    assert len(shapes_asked(servers)) > len(asked)


async def test_a_server_without_them_is_refused_at_the_start(routed):
    engine, _ = routed(facts={})
    needs = EngineRequirements(model=unloaded())
    with pytest.raises(FieldError, match="routed_experts=True .* does not report which experts it chose") as raised:
        check_facts(engine.spec, engine.facts, needs, engine.spec.url[0])
    assert "--enable-return-routed-experts" in str(raised.value)
