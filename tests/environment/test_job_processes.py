"""Jobs in processes that do many at once: how they are cancelled, and what a large message may hold up."""

import asyncio
import sys
import time
from contextlib import contextmanager

import pytest

from proxima.environment.agents import SCRIPT
from proxima.environment.episode_clock import EpisodeClock
from proxima.environment.job_processes import JobProcess

pytestmark = pytest.mark.slow


@contextmanager
def process(grace=10.0):
    made = JobProcess((sys.executable, str(SCRIPT), "tests.environment.job_functions:played"), grace=grace)
    try:
        yield made
    finally:
        made.end()


def job(**row):
    return {"row": row, "base_url": "", "api_key": "", "model": ""}


def test_a_job_that_is_late_before_its_first_step_ends_at_once():
    async def run(made):
        await made.ask(job(), EpisodeClock())
        busy = asyncio.create_task(made.ask(job(busy=1.0), EpisodeClock()))
        await asyncio.sleep(0.1)
        clock = EpisodeClock(0.2)
        with pytest.raises(TimeoutError):
            await clock.within(made.ask(job(), clock))
        return await busy

    with process() as made:
        began = time.monotonic()
        assert asyncio.run(run(made))["reward"] == 0.0
        assert time.monotonic() - began < 2 * made.grace
        assert not made.retired and not made.stopping


def test_a_process_that_reads_nothing_holds_up_no_other_work():
    """Its interpreter is busy in one call of C, and the pipe is too small for the next job."""
    pauses = list[float]()

    async def beat():
        while True:
            began = time.monotonic()
            await asyncio.sleep(0.01)
            pauses.append(time.monotonic() - began)

    async def run(made):
        await made.ask(job(), EpisodeClock())
        beating = asyncio.create_task(beat())
        busy = asyncio.create_task(made.ask(job(additions=30_000_000), EpisodeClock()))
        await asyncio.sleep(0.2)
        began = time.monotonic()
        waited = await made.ask(job(text="x" * 400_000), EpisodeClock())
        took = time.monotonic() - began
        beating.cancel()
        await busy
        return waited, took

    with process() as made:
        waited, took = asyncio.run(run(made))
    assert waited["reward"] == 400_000.0
    assert max(pauses) < took / 2


def test_a_job_that_is_cancelled_at_any_moment_is_cancelled():
    async def run(made):
        await made.ask(job(), EpisodeClock())
        for steps in range(8):
            asked = asyncio.create_task(made.ask(job(busy=0.05), EpisodeClock()))
            for _ in range(steps):
                await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        assert not made.waiting

    with process() as made:
        asyncio.run(run(made))


def test_an_answer_that_is_too_large_fails_its_job_alone():
    async def run(made):
        other = asyncio.create_task(made.ask(job(), EpisodeClock()))
        too_large, fine = await made.ask(job(answers=1 << 24), EpisodeClock()), await other
        return too_large, fine, await made.ask(job(), EpisodeClock())

    with process() as made:
        too_large, *fine = asyncio.run(run(made))
    assert "ValueError: its answer has 16,777,2" in too_large["error"]
    assert [each["reward"] for each in fine] == [0.0, 0.0]
