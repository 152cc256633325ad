"""The engine over fakes that work: the laws of every engine."""

import asyncio
import time

import pytest

from proxima.data import UserError
from proxima.engine.http.weights.sync import sync_figures
from proxima.engine.local.local_engine import collect
from proxima.engine.protocol import ScoreRequest
from proxima.laws import engine_laws
from tests.engine.http.plain_servers import LONG, go_on, requests, update
from tests.processes import until


@pytest.mark.slow
async def test_what_is_in_flight(fleet):
    engine, _ = fleet(2, slow=0.001)
    await engine_laws.in_flight(None, engine)


async def test_the_time_to_prepare_weights_is_told_apart_from_the_sync(fleet):
    engine, _ = fleet(2)
    assert (await engine.health()).detail["sync"] == {}
    prepare, passed = engine._sync.prepare, []

    async def later(*given):
        begun = time.monotonic()
        await asyncio.sleep(0.01)
        staged = await prepare(*given)
        passed.append(time.monotonic() - begun)
        return staged

    engine._sync.prepare = later
    await engine.publish(update(1))
    sync = (await engine.health()).detail["sync"]
    assert sync["prepare_seconds"] >= passed[0] > sync["seconds"] == 0


async def test_scores_at_another_temperature_are_refused(fleet):
    engine, _ = fleet()
    with pytest.raises(UserError, match="scores at temperature 1, not at 0.5"):
        await engine.score([ScoreRequest(prompt_tokens=[1], tokens=[2], temperature=0.5)])


@pytest.mark.slow
async def test_scores_do_not_wait_for_completions(fleet):
    """More of them than a server takes at once, while completions hold all its places."""
    asked = [ScoreRequest(prompt_tokens=[1, 2], tokens=[3, 4, i % 7]) for i in range(40)]
    engine, (server,) = fleet(max_running=4, health_seconds=LONG)
    server.stop_after = 0
    task = asyncio.create_task(collect(engine, requests(3, 4)))
    await until(lambda: len(server.running) == 4)
    assert len(await engine.score(asked)) == 40
    go_on([server])
    await task


def test_of_several_replicas_the_largest_figures_are_reported():
    far, slow = {"seconds": 1.0, "probe_mean": 0.3}, {"seconds": 2.0, "probe_mean": 0.2, "perturbed_mean": 0.1}
    for reports in ([far, slow], [slow, far]):
        assert sync_figures(reports) == {"seconds": 2.0, "probe_mean": 0.3, "perturbed_mean": 0.1, "replicas": 2}
    assert sync_figures([]) == {}
