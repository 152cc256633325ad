"""The event loop answers while an update runs, and the update computes what it computes in the main thread."""

import asyncio
import threading
import time

import pytest
import torch

from proxima.runtime.worker_thread import WorkerThread
from tests.runtime.test_controller import World
from tests.runtime.tiny_run import Watcher


def test_calls_run_in_another_thread_with_the_same_torch_settings():
    def settings():
        return torch.get_num_threads(), torch.is_grad_enabled(), torch.get_default_dtype(), threading.get_ident()

    async def run():
        with WorkerThread() as worker:
            return [await worker.run(settings) for _ in range(3)]

    found = asyncio.run(run())
    assert {f[:3] for f in found} == {settings()[:3]} and threading.get_ident() not in {f[3] for f in found}


def test_no_thread_is_left_between_two_calls():
    """Its OpenMP threads would count against those of the main thread, which decodes meanwhile."""

    async def run():
        with WorkerThread() as worker:
            await worker.run(lambda: torch.randn(300, 300) @ torch.randn(300, 300))
            for _ in range(200):
                if not any(thread.name.startswith("proxima-worker") for thread in threading.enumerate()):
                    return True
                await asyncio.sleep(0.01)

    assert asyncio.run(run())


def test_the_sum_of_many_numbers_has_the_same_bits_in_the_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        x = torch.randn(300, 400, generator=torch.Generator().manual_seed(1))

        async def run():
            with WorkerThread() as worker:
                return await worker.run(lambda: (torch.get_num_threads(), x @ x.T, x.sum()))

        threads, product, total = asyncio.run(run())
        assert threads == 2 and torch.equal(product, x @ x.T) and torch.equal(total, x.sum())
    finally:
        torch.set_num_threads(before)


def test_an_exception_of_the_call_is_raised():
    async def run(call):
        with WorkerThread() as worker:
            await worker.run(call)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(run(lambda: 1 / 0))


def test_a_report_runs_on_the_loop_and_its_exception_comes_after_the_call():
    seen = []

    def report(done, total):
        seen.append((done, threading.get_ident()))
        if done == 1:
            raise RuntimeError("no terminal")

    def call(progress):
        for done in (1, 2):
            progress(done, 2)
        seen.append("done")

    async def run():
        with WorkerThread() as worker:
            await worker.run_with_progress(call, report)

    with pytest.raises(RuntimeError, match="no terminal"):
        asyncio.run(run())
    here = threading.get_ident()
    assert sorted(map(str, seen)) == sorted(map(str, ["done", (1, here), (2, here)]))


def test_a_cancelled_call_ends_at_its_next_line():
    reached = []

    def endless():
        try:
            while True:
                time.sleep(0.001)
        except KeyboardInterrupt:
            reached.append("interrupted")
            raise

    async def run():
        with WorkerThread() as worker:
            task = asyncio.ensure_future(worker.run(endless))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(asyncio.wait_for(run(), 20))
    assert reached == ["interrupted"]


def test_the_loop_answers_while_an_update_runs(tmp_path):
    """A ticker, the progress of the update, and the engine's health: all are served before the update ends."""
    shown, ticks, during = [], [0], []
    world = World(tmp_path / "run", steps=1, observer=Watcher(lambda event, *facts: shown.append((event, facts[0]))))
    inner, release = world.stack.update, threading.Event()

    def update(*arguments, **options):
        result = inner(*arguments, **options)
        assert release.wait(20)  # set by the ticker below: without a turn of the loop this never returns
        return result

    async def health():
        during.append(world.journal.counts())  # of the thread of the loop

    async def ticker():
        while ("progress", "train") not in shown:
            ticks[0] += 1
            await asyncio.sleep(0.001)
        await health()
        release.set()

    async def run():
        task = asyncio.ensure_future(ticker())
        done = await asyncio.wait_for(world.controller.run(), 60)
        await task
        return done

    world.stack.update = update
    assert asyncio.run(run()) is True
    assert during == [{"selected": 3}] and ticks[0] > 0


def test_a_stop_during_an_update_is_heard_at_once_and_loses_nothing(tmp_path):
    world = World(tmp_path / "run", steps=5)
    inner, release, waited = world.stack.update, threading.Event(), []

    def update(*arguments, **options):
        result = inner(*arguments, **options)
        assert release.wait(20)
        return result

    async def run():
        task = asyncio.ensure_future(world.controller.run())
        while world.journal.counts() != {"selected": 3}:
            await asyncio.sleep(0.001)
        world.controller.stop()
        for _ in range(20):
            await asyncio.sleep(0.001)
        waited.append(not task.done())
        release.set()
        return await asyncio.wait_for(task, 60)

    world.stack.update = update
    assert asyncio.run(run()) is False
    assert waited == [True] and world.journal.step == 1 and world.journal.counts() == {"consumed": 3}
    assert [r["step"] for r in world.records()] == [1]
