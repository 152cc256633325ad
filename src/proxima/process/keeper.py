"""Keeps workers running: one that died is replaced. Calls wait for one in a queue."""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from proxima.process.worker import JobResult, Worker

T = TypeVar("T")


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
        self,
        job: str,
        arguments: Mapping[str, Any],
        seconds: float,
        cpu_seconds: float | None = None,
        *,
        first_seconds: float | None = None,
        again: bool = True,
    ) -> JobResult:
        """Run a job; see `Worker.run`. Raises what `start` raises.

        Args:
            first_seconds: instead of `seconds`, if it is the worker's first job.
            again: another worker gets the job if this one had already died.
        """
        for _ in range(2 if again else 1):
            kept = self.ready()
            limit = seconds if first_seconds is None or kept.jobs_done else first_seconds
            result = kept.run(job, arguments, limit, cpu_seconds)
            if not kept.alive:
                self.worker, self.deaths = None, self.deaths + 1
                self.why = (result and result.error) or "it died between two calls"
            if result is not None:
                return result
        died = "two workers in a row died before they started on it" if again else "its worker died between two calls"
        return JobResult(error=died)

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
