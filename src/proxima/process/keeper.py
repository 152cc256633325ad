"""Keeps workers running: the server that forks them is started again when it died, and so is a worker."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from proxima.process import worker
from proxima.process.worker import START_SECONDS, ForkServer, JobResult, Worker

T = TypeVar("T")


class WorkerSource:
    """The workers of one purpose. Their server starts with the first, and again if it has died.

    Args:
        jobs, who, options: see `ForkServer`.
    """

    def __init__(self, jobs: str, who: str, options: Mapping[str, Any]) -> None:
        self.jobs, self.who, self.options = jobs, who, options
        self.server: ForkServer | None = None
        self._lock = threading.Lock()
        self.closed = False

    def fork(self, *setup: tuple[str, Mapping[str, Any]], seconds: float = START_SECONDS, **limits: Any) -> Worker:
        """Start a worker and prepare it.

        Args:
            setup: jobs that it runs first, each within `seconds`.
            limits: override the options for this worker only.
        Raises: RuntimeError: the source is closed, the server can't start, or a job failed, and the worker is killed.
        """
        with self._lock:
            if self.closed:
                raise RuntimeError(f"the {self.who} workers are closed")
            if self.server is not None and not self.server.alive:
                self.server.close()  # if its parent was killed, it still has its workers
                self.server = None
            if self.server is None:
                self.server = worker.ForkServer(self.jobs, self.who, self.options)
            new = self.server.fork(**limits)
        for job, arguments in setup:
            result = new.run(job, arguments, seconds)
            if result is None or result.error:
                new.kill()
                raise RuntimeError((result and result.error) or "it ended at once")
        return new

    def close(self) -> None:
        """Kill the workers, whatever they are doing, and start no more. May be called twice."""
        with self._lock:
            self.closed = True
            server, self.server = self.server, None
        if server is not None:
            server.close()


class KeptWorker:
    """A worker for one thread; one that ended is replaced before the next job.

    Args:
        start: starts a worker.
    """

    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start
        self.worker: Worker | None = None
        self.started = 0  # number of workers so far
        self.deaths, self.why = 0, ""  # number of workers that have died, and the reason of the last

    def ready(self) -> Worker:
        """Return the worker, which is started if there is none; raises what `start` raises."""
        if self.worker is None:
            self.worker = self._start()
            self.started += 1
        return self.worker

    def run(
        self, job: str, arguments: Mapping[str, Any], seconds: float, cpu_seconds: float | None = None
    ) -> JobResult | None:
        """Run a job; see `Worker.run`. Raises what `start` raises."""
        kept = self.ready()
        result = kept.run(job, arguments, seconds, cpu_seconds)
        if not kept.alive:
            self.worker, self.deaths = None, self.deaths + 1
            self.why = (result and result.error) or "it died between two calls"
        return result

    def replace(self) -> None:
        """Kill the worker, if there is one."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = None


class WorkerQueue:
    """Calls that wait for one of several workers, each with a daemon thread: a call that hangs can't keep this process
    alive, as those of `concurrent.futures` do.

    Args:
        start: starts a worker.
        workers: number of workers; they start with their first call.
    """

    def __init__(self, start: Callable[[], Worker], workers: int = 1) -> None:
        self.kept = [KeptWorker(start) for _ in range(workers)]
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[KeptWorker], Any]] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._begun = self._closed = False

    def submit(self, call: Callable[[KeptWorker], T]) -> "Future[T]":
        """Queue a call, which gets the worker that is free. RuntimeError after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers are closed")
            for kept in () if self._begun else self.kept:
                threading.Thread(target=self._serve, args=(kept,), name="worker-queue", daemon=True).start()
            self._begun = True
            self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Take no more calls; the workers end after those that are queued. May be called twice."""
        with self._lock:
            self._closed = True
            for _ in self.kept:
                self._calls.put(None)

    def _serve(self, kept: KeptWorker) -> None:
        while (waiting := self._calls.get()) is not None:
            future, call = waiting
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call(kept))
                except BaseException as error:
                    future.set_exception(error)
        kept.replace()
