"""Daemon threads for trusted Python that may hang: a call that times out is abandoned, and its thread replaced."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class _Call:
    def __init__(self, function: Callable[[], Any]) -> None:
        self.function = function
        self.began: Future[None] = Future()
        self.ended: Future[Any] = Future()
        self.abandoned = False


class DaemonThreads:
    """Runs calls in daemon threads, in order of arrival; a hung call occupies its thread, but not its slot.

    Args:
        threads: simultaneous calls.
        max_hung: abandoned threads beside them; with more, calls fail at once until one of those returns.
    """

    def __init__(self, threads: int, max_hung: int = 100) -> None:
        self._threads, self._running, self._closed = threads, 0, False
        self._hung, self._max_hung = 0, max_hung
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], Any], timeout: float) -> Any:
        """What the function returns or raises; TimeoutError if it took longer than `timeout` seconds, not counting its
        time in the queue, RuntimeError if too many earlier calls still hang."""
        call = _Call(function)
        self._calls.put(call)
        self._fill()
        await asyncio.wrap_future(call.began)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call.ended), timeout)
        except TimeoutError:
            with self._lock:
                if not call.abandoned and not call.ended.done():
                    call.abandoned = True
                    self._running -= 1
                    self._hung += 1
            self._fill()
            raise

    def close(self) -> None:
        """End idle threads; a hung one is left behind, and can't delay the end of the process."""
        self._closed = True
        for _ in range(self._running):
            self._calls.put(None)

    def _fill(self) -> None:
        with self._lock:
            if self._hung >= self._max_hung:
                self._fail_queued()
            while self._running < self._threads and self._hung < self._max_hung and not self._closed:
                self._running += 1
                threading.Thread(target=self._loop, name="reward-thread", daemon=True).start()

    def _fail_queued(self) -> None:
        """Fail the queued calls: a scorer that always hangs must not exhaust the machine's threads."""
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None and call.began.set_running_or_notify_cancel():
                call.began.set_exception(RuntimeError(f"not called: {self._hung} earlier calls still hang"))

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.began.set_running_or_notify_cancel():
                continue  # the caller was cancelled
            call.ended.set_running_or_notify_cancel()
            call.began.set_result(None)
            try:
                result = call.function()
            except BaseException as error:
                call.ended.set_exception(error)
            else:
                call.ended.set_result(result)
            with self._lock:
                if call.abandoned:
                    self._hung -= 1
                    return  # another thread has its slot
