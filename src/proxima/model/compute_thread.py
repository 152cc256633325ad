"""Tensor work and the event loop in two threads, so that neither waits for the other."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Progress = Callable[[int, int], None]
POLL_SECONDS = 1.0  # between two checks for a signal
GRACE_SECONDS = 5.0  # an interrupted event loop has this long to end
Job = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class ComputeThread:
    """The thread that runs all tensor work: loading, decoding, advantages, updates.

    `serve` keeps it in the calling thread, the main thread, and runs the event loop in a separate thread. A thread that
    runs torch code gets an OpenMP team, even for a small `sqrt`, and with more OpenMP threads than cores libgomp makes
    all of them wait by sleeping: a second such thread costs a third of the speed. Without `serve`, calls run in place.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] | None = None
        self._ident = threading.get_ident()

    def submit(self, call: Callable[..., T], *arguments: Any) -> "Future[T]":
        """Queue a call without waiting for it."""
        job: Job = (Future(), call, arguments)
        if self._jobs is None or threading.get_ident() == self._ident:
            perform(job)
        else:
            self._jobs.put(job)
        return job[0]

    @property
    def serving(self) -> bool:
        """True within `serve`; elsewhere a call runs in place."""
        return self._jobs is not None

    @property
    def wanted(self) -> bool:
        """True if another call is waiting, or, where calls run in place, if the event loop may be."""
        return self._jobs is None or not self._jobs.empty()

    def call(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return or raise what `call(*arguments)` does; blocks."""
        return self.submit(call, *arguments).result()

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Return or raise what `call(*arguments)` does. A call that has started runs to its end, awaited or not."""
        return await asyncio.wrap_future(self.submit(call, *arguments))

    async def run_with_progress(self, call: Callable[[Progress], T], report: Progress) -> T:
        """Return or raise what `call(progress)` does; each `progress(done, total)` becomes a `report` on the event
        loop.

        A report that raises does not stop the call; its exception is raised when the call has ended.
        """
        loop = asyncio.get_running_loop()
        errors = list[BaseException]()

        def on_loop(done: int, total: int) -> None:
            try:
                report(done, total)
            except BaseException as error:  # the event loop would only log it
                errors.append(error)

        def progress(done: int, total: int) -> None:
            loop.call_soon_threadsafe(on_loop, done, total)

        result = await self.run(call, progress)
        await asyncio.sleep(0)  # the last reports
        if errors:
            raise errors[0]
        return result

    def serve(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run the coroutine on an event loop in another thread, and its calls here, until it is done.

        A KeyboardInterrupt here aborts the running call, discards the queued ones and cancels the coroutine. A loop
        that is blocked and does not react within GRACE_SECONDS, or before the next KeyboardInterrupt, is abandoned.
        """
        jobs = self._jobs = SimpleQueue()
        self._ident = threading.get_ident()
        outcome: Future[T] = Future()
        running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []  # empty until the loop runs

        def run() -> T:
            with asyncio.Runner() as runner:
                loop = runner.get_loop()
                task = loop.create_task(coroutine)
                running.append((loop, task))
                return loop.run_until_complete(task)

        def run_loop() -> None:
            with suppress(KeyboardInterrupt):
                perform((outcome, run, ()))
            jobs.put(None)

        thread = threading.Thread(target=run_loop, name="proxima-loop", daemon=True)
        interrupted: KeyboardInterrupt | None = None
        while True:
            try:
                if not thread.ident:
                    thread.start()
                # A signal just before a wait is only noticed after it, so a wait without a job times out periodically.
                seconds = GRACE_SECONDS if interrupted else POLL_SECONDS
                job = jobs.get(timeout=seconds)
                if job is None:
                    break
                if interrupted is None:
                    perform(job)
                else:
                    job[0].cancel()
            except Empty:
                if interrupted is not None:
                    break
            except KeyboardInterrupt as interrupt:
                if interrupted is not None:
                    break
                interrupted = interrupt
                for loop, task in running:
                    with suppress(RuntimeError):  # the loop has ended
                        loop.call_soon_threadsafe(task.cancel)
        self._jobs = None
        if interrupted is not None:
            raise interrupted
        thread.join()
        return outcome.result()


def perform(job: Job) -> None:
    """Run a job, unless its future was cancelled, and give the future its result."""
    future, call, arguments = job
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call(*arguments)
    except StopIteration as error:  # asyncio can't carry it to whoever awaits the result
        wrapped = RuntimeError("raised StopIteration")
        wrapped.__cause__ = error
        future.set_exception(wrapped)
    except BaseException as error:  # raised where the result is awaited
        future.set_exception(error)
        if isinstance(error, KeyboardInterrupt):  # the task that awaited the result may be gone
            raise
    else:
        future.set_result(result)
