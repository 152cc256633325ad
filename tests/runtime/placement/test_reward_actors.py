"""Reward workers as actors of a real Ray cluster: what a hostile text costs, and what the death of an actor."""

import asyncio
import logging
import os
import threading
import time

import pytest

from proxima.reward import Format
from proxima.reward.workers.pool import WorkerPool
from proxima.runtime.placement.reward_actors import ActorPool
from tests.reward.make import scored
from tests.reward.test_pool import HANGS, code, found, regex
from tests.reward.test_runner import THOUGHT

ray, psutil = pytest.importorskip("ray"), pytest.importorskip("psutil")
pytestmark = [pytest.mark.slow, pytest.mark.waits]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    paths = {"env_vars": {"PYTHONPATH": os.environ.get("PYTHONPATH", "")}}
    quiet = {"include_dashboard": False, "logging_level": logging.ERROR, "log_to_driver": False}
    ray.init(address="local", num_cpus=2, runtime_env=paths, **quiet)
    yield
    ray.shutdown()


def results(pool, jobs):
    try:
        return asyncio.run(pool.run(jobs))
    finally:
        pool.close()


def test_results_and_limits_are_those_of_processes(tmp_path):
    hungry = code(tmp_path, "x = bytearray(1 << 30)")
    jobs = [*(regex(f"x{i}") for i in range(20)), HANGS, hungry, regex("5")]
    options = {"timeout": 3.0, "memory_mb": 256}
    there, here = (results(kind(2, **options), jobs) for kind in (ActorPool, WorkerPool))
    assert found(there) == [*map(str, range(20)), None, None, "5"]
    assert there == here and [bool(result.error) for result in there[20:]] == [True, True, False]


def test_an_actor_that_is_killed_costs_its_job_and_is_replaced():
    pool = ActorPool(1, timeout=30.0)
    assert found(asyncio.run(pool.run([regex("1")]))) == ["1"]
    children = psutil.Process().children(recursive=True)
    (pid,) = (child.pid for child in children if "RewardActor" in " ".join(child.cmdline()))
    threading.Timer(1.0, os.kill, (pid, 9)).start()
    begun = time.monotonic()
    lost, after = results(pool, [HANGS, regex("2")])
    assert lost.value is None and "its actor died" in (lost.error or "") and time.monotonic() - begun < 25
    assert after.value == {"answer": "2"} and pool.started == 2


def test_an_actor_stays_where_its_worker_is_replaced():
    pool = ActorPool(1, timeout=30.0, recycle=2)
    assert [result.value for result in results(pool, [regex(f"{i}") for i in range(7)])] == [
        {"answer": f"{i}"} for i in range(7)
    ]
    assert pool.started == 1


def test_a_score_that_was_lost_is_invalid_and_never_0(monkeypatch):
    (score,) = scored([Format()], None, THOUGHT, pool=ActorPool)
    assert score.valid and score.value == 1.0
    monkeypatch.setattr("proxima.runtime.placement.reward_actors.START_SECONDS", 1e-6)  # no actor is ready so soon
    (score,) = scored([Format()], None, THOUGHT, pool=ActorPool)
    assert not score.valid
