"""An event loop in a dedicated thread, callable from any thread."""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")
LastWork = Callable[[], Coroutine[Any, Any, None]]
CLOSED = "the engine is closed"
# Unfinished generators of a task are closed by separate tasks, which start after it ends. At the end these are waited
# for ROUNDS times, as generators may contain others, for SECONDS each.
ROUNDS = 4
SECONDS = 5.0


class EventLoopThread:
    """Runs coroutines for callers in other threads and event loops. Callers may block: the thread does nothing else."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        """Run the loop until it is stopped. Ctrl-C reaches a task that awaits a call in the main thread; asyncio gives
        it to whoever awaits the task, and ends the loop, which `close` needs."""
        while True:
            try:
                return self._loop.run_forever()
            except KeyboardInterrupt:
                continue

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return or raise its result. Cancelling the caller cancels it.

        Raises:
            RuntimeError: the loop is closed, or was closed before the coroutine ended.
        """
        try:
            return await asyncio.wrap_future(self.start(work))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self.closed and caller is not None and not caller.cancelling():
                raise RuntimeError(CLOSED) from None
            raise

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Like `run`, but block until the result is available."""
        return self.start(work).result()

    def submit(self, call: Callable[..., object], *arguments: Any) -> None:
        """Schedule a call in the loop's thread; does nothing once the loop is closed."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(call, *arguments)

    def start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine in the loop and return its future, which the caller must keep while the coroutine runs.

        Raises:
            RuntimeError: the loop is closed.
        """
        with self._closing:  # no work is submitted to a loop that is closing
            if not self.closed:
                return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        raise RuntimeError(CLOSED)

    def close(self, last: LastWork | None = None, after: LastWork | None = None) -> None:
        """Run `last`, cancel all other tasks, run `after`, and stop the thread. May be called twice."""
        with self._closing:
            self.closed = True
            if not self._loop.is_running():
                return
            ended = asyncio.run_coroutine_threadsafe(self._end(last, after), self._loop)
        ended.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self, last: LastWork | None, after: LastWork | None) -> None:
        try:
            if last is not None:
                await last()
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for _ in range(ROUNDS):
                await asyncio.sleep(0)
                tasks = asyncio.all_tasks() - {asyncio.current_task()}
                if tasks:
                    await asyncio.wait(tasks, timeout=SECONDS)
            await self._loop.shutdown_asyncgens()
            if after is not None:
                await after()


class Arrivals(Generic[T]):
    """A queue from other threads to a caller that waits in the event loop in which the queue was created."""

    def __init__(self) -> None:
        self.items: deque[T | BaseException] = deque()
        self._loop = asyncio.get_running_loop()
        self._some = asyncio.Event()

    def put(self, item: T | BaseException) -> None:
        """Add an item; may be called from any thread."""
        self.items.append(item)
        with suppress(RuntimeError):  # the caller's event loop is closed
            self._loop.call_soon_threadsafe(self._some.set)

    async def get(self) -> T:
        """Wait for the next item; raise it if it is an exception."""
        while not self.items:
            await self._some.wait()
            self._some.clear()
        item = self.items.popleft()
        if isinstance(item, BaseException):
            raise item
        return item
