"""`proximal: next` needs an engine that says what is in flight, and scores."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest

from proxima.data import FieldError
from proxima.engine.executor import Executor
from proxima.rollout.collector import Collector
from proxima.runtime.launch.rl_workload import make_next_policy
from tests.training.test_next_policy import Recording


class Settings:
    next_from = "engine"
    chain = None


def test_an_engine_that_can_not_is_refused_and_a_failing_one_is_reported():
    engine = Recording()
    generator, collector = SimpleNamespace(engine=(executor := Executor(engine)), episodes=None), Collector()
    cache = make_next_policy(Settings, generator, collector, None, None)
    assert cache.trainer is None
    engine.flying = 1
    asyncio.run(executor.pause())
    (warning,) = cache.warnings()
    assert warning.startswith("the engine gave no next_log_prob (TypeError: ") and cache.warnings() == []
    engine.capabilities = replace(Recording.capabilities, score=False)
    with pytest.raises(
        FieldError, match="engine='Recording' can't score given tokens; set algorithm.next_from=trainer"
    ):
        make_next_policy(Settings, generator, collector, None, None)
    engine.capabilities = replace(Recording.capabilities, in_flight=False)
    with pytest.raises(FieldError, match="engine='Recording' doesn't report the requests in flight; use local"):
        make_next_policy(Settings, generator, collector, None, None)
