"""Virtual time: a deadlock is found instead of waited for. How long things take: test_stall.py, test_disk.py."""

import asyncio

import pytest

from proxima.runtime.watch.clock import Deadlock, VirtualClock, run_virtually


def test_a_deadlock_is_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtually(main(), VirtualClock())
