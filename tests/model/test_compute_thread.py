"""The event loop answers while an update runs, and the update computes what it computes in the main thread."""

import asyncio
import os
import signal
import threading
import time

import pytest

from proxima.model.compute_thread import ComputeThread


def test_calls_run_in_the_thread_that_serves_and_the_loop_in_another():
    compute = ComputeThread()

    async def run():
        seen = {compute.call(threading.get_ident), await compute.run(threading.get_ident)}
        return seen, threading.get_ident()

    seen, loop = compute.serve(run())
    assert seen == {threading.get_ident()} and loop != threading.get_ident()


def test_without_serving_calls_run_in_place():
    compute = ComputeThread()

    async def run():
        return await compute.run(threading.get_ident)

    assert asyncio.run(run()) == compute.call(threading.get_ident) == threading.get_ident()


def test_a_running_call_sees_that_another_one_waits():
    compute = ComputeThread()
    assert compute.wanted  # in place: the event loop can't run beside it

    def call(queued):
        before = compute.wanted
        queued.set()
        while not compute.wanted:
            time.sleep(0.001)
        return before

    async def run():
        queued = threading.Event()
        first = asyncio.ensure_future(compute.run(call, queued))
        await asyncio.sleep(0)
        await asyncio.to_thread(queued.wait)
        await compute.run(int)
        return await first

    assert compute.serve(run()) is False


def test_an_exception_of_a_call_or_of_the_coroutine_is_raised():
    compute = ComputeThread()

    async def call():
        with pytest.raises(ZeroDivisionError):
            await compute.run(lambda: 1 / 0)
        raise KeyError("of the coroutine")

    with pytest.raises(KeyError):
        compute.serve(call())


def test_a_call_that_raises_stop_iteration_does_not_hang():
    compute = ComputeThread()
    with pytest.raises(RuntimeError, match="StopIteration"):
        compute.serve(compute.run(lambda: next(iter(()))))


@pytest.mark.slow
def test_ctrl_c_leaves_a_blocked_loop_behind(monkeypatch):
    monkeypatch.setattr("proxima.model.compute_thread.GRACE_SECONDS", 0.1)
    compute, blocked = ComputeThread(), threading.Event()

    async def run():
        os.kill(os.getpid(), signal.SIGINT)
        blocked.wait(600)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compute.serve(run())
    assert not blocked.is_set() and time.monotonic() - started < 300
    blocked.set()


@pytest.mark.slow
def test_the_third_ctrl_c_leaves_a_thread_that_serves_again():
    compute, blocked = ComputeThread(), threading.Event()

    async def run():
        os.kill(os.getpid(), signal.SIGINT)  # asks the loop, which is blocked, to end
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGINT)  # leaves it behind
        blocked.wait(600)

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        compute.serve(run())
    assert time.monotonic() - started < 300
    assert asyncio.run(asyncio.wait_for(asyncio.to_thread(compute.call, int, "7"), 300)) == 7  # nobody serves: in place
    assert compute.serve(compute.run(int, "8")) == 8
    blocked.set()


def test_a_report_runs_on_the_loop_and_its_exception_comes_after_the_call():
    seen = []
    compute = ComputeThread()

    def report(done, total):
        seen.append((done, threading.current_thread().name))
        if done == 1:
            raise RuntimeError("no terminal")

    def call(progress):
        for done in (1, 2):
            progress(done, 2)
        seen.append("done")

    with pytest.raises(RuntimeError, match="no terminal"):
        compute.serve(compute.run_with_progress(call, report))
    assert sorted(map(str, seen)) == sorted(map(str, ["done", (1, "proxima-loop"), (2, "proxima-loop")]))


def test_ctrl_c_ends_the_running_call():
    compute, reached = ComputeThread(), []

    def endless():
        try:
            reached.append("running")
            while True:
                time.sleep(0.001)
        except KeyboardInterrupt:
            reached.append("interrupted")
            raise

    async def run():
        task = asyncio.ensure_future(compute.run(endless))
        while not reached:
            await asyncio.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)
        await task

    with pytest.raises(KeyboardInterrupt):
        compute.serve(run())
    assert reached == ["running", "interrupted"]


@pytest.mark.slow
def test_ctrl_c_cancels_a_coroutine_that_computes_nothing():
    compute, ended = ComputeThread(), []

    async def run():
        try:
            await asyncio.sleep(0.1)  # a signal on the very way into a wait is seen only when the wait ends
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        compute.serve(run())
    assert ended == [True]
