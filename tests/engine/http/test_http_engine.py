"""The engine over fakes that work: the laws of every engine."""

import asyncio
import time

import numpy as np
import pytest

from proxima.data import UserError
from proxima.engine.http import SyncReport
from proxima.engine.http.folder_sync import sync_figures
from proxima.engine.local import collect
from proxima.engine.protocol import ScoreRequest
from tests.engine.http.fake_model import STOP, sequence_log_probs
from tests.engine.http.plain_dialect import engine_over, expected, fakes, requests, update

WEIGHTS = {0: 0.5, 1: 0.8, 2: 1.3}


def test_completions_have_the_log_probs_of_the_model(tmp_path):
    asked = requests(6, 4)
    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        given = asyncio.run(collect(engine, asked))
    assert [completion.key for completion in given] == [(r.prompt.uid, r.sample, 0) for r in asked]
    for request, completion in zip(asked, given, strict=True):
        np.testing.assert_allclose(completion.sampled_log_prob, expected(request, completion, WEIGHTS), atol=1e-6)
        assert completion.untruncated_log_prob is completion.sampled_log_prob
        assert completion.finish_reason == ("stop" if completion.tokens[-1] == STOP else "length")
        assert completion.text == "".join("abcdefg"[i] for i in completion.tokens if i != STOP)
    assert len({completion.tokens.tobytes() for completion in given}) > len(given) / 2


def test_new_weights_are_used_and_reported(tmp_path):
    asked = requests(4, 2)

    async def go(engine):
        await engine.publish(update(1, WEIGHTS[1]))
        first = await collect(engine, asked)
        await engine.pause()
        await engine.publish(update(2, WEIGHTS[2]))
        await engine.resume()
        return first, await collect(engine, asked), await engine.health()

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        first, second, health = asyncio.run(go(engine))
    for version, given in ((1, first), (2, second)):
        for request, completion in zip(asked, given, strict=True):
            assert set(completion.policy_version.tolist()) == {version}
            np.testing.assert_allclose(completion.sampled_log_prob, expected(request, completion, WEIGHTS), atol=1e-6)
    assert health.version == 2
    assert health.detail["sync"]["replicas"] == 2


def test_the_time_to_prepare_weights_is_told_apart_from_the_sync(tmp_path):
    async def go(engine):
        prepare, passed = engine._sync.prepare, []

        async def later(update, label):
            begun = time.monotonic()
            await asyncio.sleep(0.05)
            await prepare(update, label)
            passed.append(time.monotonic() - begun)

        engine._sync.prepare = later
        before = await engine.health()
        await engine.publish(update(1, WEIGHTS[1]))
        return before, await engine.health(), passed

    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        before, health, (passed,) = asyncio.run(go(engine))
    assert before.detail["sync"] == {}
    assert health.detail["sync"]["prepare_seconds"] >= passed > health.detail["sync"]["seconds"] == 0


def test_scores_are_those_of_the_model(tmp_path):
    asked = [ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4, i]) for i in range(5)]
    with fakes(2) as servers, engine_over(servers, tmp_path) as engine:
        scores = asyncio.run(engine.score(asked))
        with pytest.raises(UserError, match="scores at temperature 1, not at 0.5"):
            asyncio.run(engine.score([ScoreRequest(prompt_tokens=[1], tokens=[2], temperature=0.5)]))
    for request, column in zip(asked, scores, strict=True):
        np.testing.assert_allclose(column, sequence_log_probs(0.5, request.prompt_tokens, request.tokens), atol=1e-6)


def test_the_same_request_draws_the_same_at_any_replica(tmp_path):
    asked = requests(5, 3)
    with fakes(3) as servers, engine_over(servers, tmp_path) as engine:
        assert engine.capabilities.deterministic
        first, second = (asyncio.run(collect(engine, asked)) for _ in range(2))
    assert first == second


def test_scores_do_not_wait_for_completions(tmp_path):
    """More of them than a server takes at once, while completions hold all its places."""
    asked = [ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4, i % 7]) for i in range(40)]

    async def go(engine, server):
        server.stop_after = 0
        task = asyncio.create_task(collect(engine, requests(3, 4)))
        async with asyncio.timeout(120):
            while len(server.running) < 4:
                await asyncio.sleep(0.002)
            scores = await engine.score(asked)
        server.stop_after = None
        await task
        return scores

    with fakes(1) as servers, engine_over(servers, tmp_path, max_running=4, health_seconds=60.0) as engine:
        assert len(asyncio.run(go(engine, servers[0]))) == 40


def test_of_several_replicas_the_one_that_follows_least_is_reported():
    def report(url, **metrics):
        return SyncReport(url=url, version=3, how="value", seconds=metrics.pop("seconds"), metrics=metrics)

    follows = report("a", seconds=2.0, probe_mean=0.2, slope=1.02, slope_error=0.3, slope_limit=0.6)
    stays = report("b", seconds=1.0, probe_mean=0.1, slope=0.0, slope_error=0.01, slope_limit=0.2)
    unjudged = report("c", seconds=0.5, probe_mean=0.3)
    figures = {"slope": 0.0, "slope_error": 0.01, "slope_limit": 0.2, "seconds": 2.0, "probe_mean": 0.3, "how": "value"}
    for reports in ([follows, stays, unjudged], [unjudged, stays, follows]):
        assert sync_figures(reports) == figures | {"replicas": 3}
    far = report("d", seconds=0.5, slope=2.5, slope_error=0.1, slope_limit=0.5)
    assert sync_figures([stays, far])["slope"] == 2.5
    assert sync_figures([]) == {}
