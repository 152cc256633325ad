"""A few daemon threads for trusted Python that may still hang: a call that passes its time-out is given up, and its
thread replaced."""

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
        self.given_up = False


class DaemonThreads:
    """Runs calls in at most `threads` daemon threads, in order of arrival. A hung call keeps its thread, never its
    place.

    Args:
        threads: calls at once.
        hung: threads given up that may be there beside them; with more, calls fail at once until one comes back.
    """

    def __init__(self, threads: int, hung: int = 100) -> None:
        self._wanted, self._running, self._closed = threads, 0, False
        self._hung, self._most = 0, hung
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()

    async def run(self, function: Callable[[], Any], timeout: float) -> Any:
        """What the function returns or raises.

        Raises:
            TimeoutError: it took longer than `timeout` seconds, counted from when it began, not from when it was
                queued.
            RuntimeError: too many calls before it hang still.
        """
        call = _Call(function)
        self._calls.put(call)
        self._fill()
        await asyncio.wrap_future(call.began)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(call.ended), timeout)
        except TimeoutError:
            with self._lock:
                if not call.given_up and not call.ended.done():
                    call.given_up = True
                    self._running -= 1
                    self._hung += 1
            self._fill()
            raise

    def close(self) -> None:
        """Let idle threads end; a hung one is left to the end of the process, which it can't delay."""
        self._closed = True
        for _ in range(self._running):
            self._calls.put(None)

    def _fill(self) -> None:
        with self._lock:
            if self._hung >= self._most:
                self._refuse()
            while self._running < self._wanted and self._hung < self._most and not self._closed:
                self._running += 1
                threading.Thread(target=self._loop, name="reward-thread", daemon=True).start()

    def _refuse(self) -> None:
        """Fail the calls that wait: a scorer that always hangs must not take all the threads of the machine."""
        while True:
            try:
                call = self._calls.get_nowait()
            except queue.Empty:
                return
            if call is not None and call.began.set_running_or_notify_cancel():
                call.began.set_exception(RuntimeError(f"not asked: {self._hung} calls before it hang still"))

    def _loop(self) -> None:
        while (call := self._calls.get()) is not None:
            if not call.began.set_running_or_notify_cancel():
                continue  # whoever asked has gone
            call.ended.set_running_or_notify_cancel()
            call.began.set_result(None)
            try:
                result = call.function()
            except BaseException as problem:
                call.ended.set_exception(problem)
            else:
                call.ended.set_result(result)
            with self._lock:
                if call.given_up:
                    self._hung -= 1
                    return  # another thread has this one's place
