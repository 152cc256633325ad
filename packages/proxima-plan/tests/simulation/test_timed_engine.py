"""A timed engine alone: what a caller that leaves takes along, and the version of its weights."""

import asyncio

import pytest
from torch import nn

from proxima.data.flow import Prompt
from proxima.engine.protocol import Request, Sampling, WeightUpdate
from proxima.runtime.watch.clock import VirtualClock, run_virtually
from proxima_plan.simulation.timed_engine import TimedEngine

from .simulated import PUBLISH, TOKENS, ByHand, config

GROUP = 2 * TOKENS * 0.11  # seconds of a prompt's two completions in one slot
SETTINGS = config("train.completions_per_prompt=2")


def with_engine(use):
    """Run `use(engine)` on virtual time: an engine of one slot, which reads prompts in no time."""
    clock = VirtualClock()
    run_virtually(use(TimedEngine(SETTINGS, ByHand(prefill_token=0.0), 1, 1, clock.now)), clock)


async def given(engine, uid):
    prompt = Prompt(uid=uid, messages=(), tokens=(1, 2))
    (completion,) = [c async for c in engine.generate([Request(prompt=prompt, sample=0, sampling=Sampling())])]
    return completion


async def leaves(caller):
    await asyncio.sleep(0.01)
    caller.cancel()
    await asyncio.gather(caller, return_exceptions=True)


def test_a_caller_that_leaves_ends_its_own_completions_and_no_others():
    """The second completion of a prompt waits for the one slot."""

    async def use(engine):
        first, other = (asyncio.create_task(given(engine, uid)) for uid in (0, 1))
        await leaves(other)
        assert len((await first).tokens) == 2 * TOKENS and engine.now() == pytest.approx(GROUP)
        await leaves(asyncio.create_task(given(engine, 2)))
        health, began = await engine.health(), engine.now()
        assert (health.running, health.waiting) == (0, 0)
        await given(engine, 3)
        assert engine.now() - began == pytest.approx(GROUP)

    with_engine(use)


def test_published_weights_have_their_version():
    async def use(engine):
        assert (await engine.health()).version == 0 and (await given(engine, 0)).policy_version.max() == 0
        began = engine.now()
        await engine.publish(WeightUpdate(version=3, module=nn.Module()))
        assert (await engine.health()).version == 3 and engine.now() - began == pytest.approx(PUBLISH)
        assert (await given(engine, 1)).policy_version.min() == 3

    with_engine(use)
