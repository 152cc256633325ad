"""The seams to time and to whoever watches."""

import asyncio
import time
from datetime import datetime

import pytest

from proxima.runtime.clock import ManualClock, SystemClock
from proxima.runtime.observer import NullObserver, Tee


def test_manual_clock_wakes_in_order_of_deadlines():
    clock, woken = ManualClock("2026-09-02T12:00:00+00:00"), []

    async def sleeper(name, *seconds):
        for s in seconds:
            await clock.sleep(s)
            woken.append((name, clock.now()))

    async def main():
        tasks = [
            asyncio.create_task(sleeper("b", 2.0, 1.0)),
            asyncio.create_task(sleeper("a", 1.0)),
            asyncio.create_task(sleeper("now", 0.0)),
        ]
        for _ in range(3):
            await asyncio.sleep(0)
        assert woken == [("now", 0.0)]
        clock.advance(0.5)
        await asyncio.sleep(0)
        assert len(woken) == 1
        clock.advance(2.0)
        for _ in range(3):
            await asyncio.sleep(0)
        assert woken[1:] == [("a", 2.5), ("b", 2.5)]
        clock.advance(1.0)
        await asyncio.gather(*tasks)
        assert woken[3:] == [("b", 3.5)]

    asyncio.run(main())
    assert clock.wall() == "2026-09-02T12:00:03.500+00:00"
    with pytest.raises(ValueError, match="must be >= 0"):
        clock.advance(-1)


def test_manual_clock_forgets_a_cancelled_sleeper():
    clock = ManualClock()

    async def main():
        task = asyncio.create_task(clock.sleep(1.0))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        clock.advance(2.0)

    asyncio.run(main())


def test_system_clock():
    clock, before = SystemClock(), time.time()
    assert clock.now() <= clock.now()
    assert before - 1 <= datetime.fromisoformat(clock.wall()).timestamp() <= time.time() + 1
    asyncio.run(clock.sleep(-1))


class Listener(NullObserver):
    def __init__(self, fails_in=None):
        self.fails_in, self.heard = fails_in, []

    def _hear(self, event, *facts):
        self.heard.append((event, *facts))
        if event == self.fails_in:
            raise RuntimeError("no paper")

    def step(self, record, sample):
        self._hear("step", record["step"])

    def warning(self, text):
        self._hear("warning", text)

    def finished(self, summary):
        self._hear("finished", summary["status"])


def test_a_failing_observer_is_switched_off_and_the_others_hear_of_it():
    bad, good = Listener(fails_in="step"), Listener()
    tee = Tee(bad, good)
    for step in (1, 2):
        tee.step({"step": step}, None)
    tee.progress("train", 1, 2, "tokens")
    tee.finished({"status": "done"})
    assert bad.heard == [("step", 1)]
    text = "Listener failed in step (RuntimeError: no paper) and is switched off; the run goes on"
    assert good.heard == [("warning", text), ("step", 1), ("step", 2), ("finished", "done")]


def test_all_observers_failing_fails_nothing():
    tee = Tee(Listener("step"), Listener("warning"))
    tee.step({"step": 1}, None)
    tee.step({"step": 2}, None)


def test_ctrl_c_goes_through():
    class Impatient(NullObserver):
        def step(self, record, sample):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tee(Impatient()).step({"step": 1}, None)
