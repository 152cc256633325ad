"""Daemon threads for trusted Python that may hang: a call that times out is abandoned, with its thread."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary


class DaemonThreads:
    """Runs each call in its own daemon thread, in order of arrival; a hung call keeps its thread, not its slot.

    Args:
        threads: simultaneous calls, of the callers in one event loop.
        max_hung: maximum number of abandoned threads; from then on, calls fail at once until one of these returns.
    """

    def __init__(self, threads: int, max_hung: int = 100) -> None:
        self._threads, self._hung, self._max_hung = threads, 0, max_hung
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], Any], timeout: float) -> Any:
        """Return or raise what the function does; TimeoutError if it takes longer than `timeout` seconds, not counting
        its time in the queue, RuntimeError if too many earlier calls still hang."""
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._threads))
        async with slots:
            if self._hung >= self._max_hung:  # a scorer that always hangs must not exhaust the machine's threads
                raise RuntimeError(f"not called: {self._hung} earlier calls still hang")
            ended: Future[Any] = Future()
            threading.Thread(target=self._call, args=(function, ended), name="reward-thread", daemon=True).start()
            try:
                return await asyncio.wait_for(asyncio.wrap_future(ended), timeout)
            except BaseException:
                with self._lock:
                    self._hung += ended.cancel()  # no effect if the function itself raised
                raise

    def _call(self, function: Callable[[], Any], ended: "Future[Any]") -> None:
        try:
            tell = partial(ended.set_result, function())
        except BaseException as error:
            tell = partial(ended.set_exception, error)
        with self._lock:
            if ended.cancelled():
                self._hung -= 1
            else:
                tell()
