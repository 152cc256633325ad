"""Virtual time: sleeps in the right order and in no time, and a deadlock is found instead of waited for."""

import asyncio

import pytest

from proxima.runtime.watch.virtual_time import Deadlock, VirtualClock, run_virtually


def test_sleeps_end_in_order_and_take_no_time():
    clock, seen = VirtualClock(), []

    async def sleep(seconds):
        await asyncio.sleep(seconds)
        seen.append((seconds, clock.now()))

    async def main():
        await asyncio.gather(sleep(3600.0), sleep(2.5), sleep(0.0), sleep(2.5))
        return clock.wall()

    wall = run_virtually(main(), clock)  # an hour; pytest's time-out is less
    assert [seconds for seconds, _ in seen] == [0.0, 2.5, 2.5, 3600.0]
    assert [at for _, at in seen] == pytest.approx([0.0, 2.5, 2.5, 3600.0])
    assert wall == "2026-01-01T01:00:00.000+00:00"


def test_a_deadlock_is_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtually(main(), VirtualClock())
