"""Reward workers as actors of a real Ray cluster: what a hostile text costs, and what the death of an actor."""

import asyncio
import threading
import time
from dataclasses import replace

import pytest

from proxima.reward.workers.pool import WorkerPool
from proxima.runtime.placement import ray_cluster
from proxima.runtime.placement.ray_cluster import ActorPool
from tests import ray_cluster as running_cluster
from tests.reward.test_pool import HANGS, code, found, regex

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.waits
KILLED = "tests/runtime/placement/test_reward_actors.py::test_an_actor_that_is_killed_costs_its_job_and_is_replaced"
BUSY = "import os, pathlib, time\npathlib.Path('{}').write_text(str(os.getpid()))\ntime.sleep(600)"


@pytest.fixture(scope="module", autouse=True)
def driver():
    with running_cluster.driver():
        yield


def results(pool, jobs):
    try:
        return asyncio.run(pool.run(jobs))
    finally:
        pool.close()


@pytest.mark.slow
@pytest.mark.campaign(KILLED)
def test_results_and_limits_are_those_of_processes(tmp_path):
    hungry = code(tmp_path, "x = bytearray(1 << 30)")
    jobs = [*(regex(f"x{i}") for i in range(9)), replace(HANGS, cpu_seconds=0.2), hungry, regex("5")]
    pools = [kind(1, timeout=600.0, memory_mb=256) for kind in (ActorPool, WorkerPool)]
    there, here = (results(pool, jobs) for pool in pools)
    assert found(there) == [*map(str, range(9)), None, None, "5"]
    assert there == here and [bool(result.error) for result in there[9:]] == [True, True, False]
    assert pools[0].started == 1  # an actor stays where its worker is replaced


@pytest.mark.slow
def test_a_cluster_that_grants_no_core_costs_a_job(monkeypatch):
    monkeypatch.setattr(ray_cluster, "START_SECONDS", 1e-6)  # no actor is ready so soon
    (lost,) = results(ActorPool(1, timeout=600.0, restricted=False), [regex("1")])
    assert lost.value is None and "no actor after" in lost.error


async def closed(pool, jobs, when):
    """The results of jobs whose pool is closed when something has happened."""
    running = asyncio.create_task(pool.run(jobs))
    while not (when() or running.done()):
        await asyncio.sleep(0.05)
    pool.close()
    return await running


def test_close_ends_a_job_that_hangs_and_fails_the_next(tmp_path):
    file = tmp_path / "pid"
    jobs = [code(tmp_path, BUSY.format(file)), regex("3")]
    hung, queued = asyncio.run(closed(ActorPool(1, timeout=600.0, restricted=False), jobs, file.exists))
    assert "its actor died" in hung.error and "the pool is closed" in queued.error


def test_close_ends_the_wait_for_an_actor(monkeypatch):
    start = ray_cluster.start_actor
    monkeypatch.setattr(ray_cluster, "start_actor", lambda *words, num_cpus: start(*words, num_cpus=1e6))
    pool = ActorPool(1, timeout=600.0)
    (lost,) = asyncio.run(closed(pool, [regex("1")], lambda: pool._alive))
    assert lost.value is None and "no actor after" in lost.error


@pytest.mark.slow
def test_an_actor_that_is_killed_costs_its_job_and_is_replaced(tmp_path):
    file = tmp_path / "pid"

    def kill() -> None:
        while not file.exists() or not file.read_text():
            time.sleep(0.05)
        above = psutil.Process(int(file.read_text())).parents()
        next(process for process in above if "RewardActor" in " ".join(process.cmdline())).kill()

    threading.Thread(target=kill, daemon=True).start()
    pool = ActorPool(1, timeout=600.0, restricted=False)
    lost, after = results(pool, [code(tmp_path, BUSY.format(file)), regex("2")])
    assert lost.value is None and "its actor died" in (lost.error or "")
    assert after.value == {"answer": "2"} and pool.started == 2
