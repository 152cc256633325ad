"""Keeps workers running: the server that forks them is started again when it died, and so is a worker."""

import threading
from collections.abc import Callable, Mapping
from time import monotonic
from typing import Any

from proxima.process import worker
from proxima.process.worker import START_SECONDS, ForkServer, JobResult, Worker


class WorkerSource:
    """The workers of one purpose. Their server starts with the first, and again if it has died.

    Args:
        jobs, who, options: see `ForkServer`.
    """

    def __init__(self, jobs: str, who: str, options: Mapping[str, Any]) -> None:
        self.jobs, self.who, self.options = jobs, who, options
        self.server: ForkServer | None = None
        self._lock = threading.Lock()
        self._closed = False

    def fork(self, **limits: Any) -> Worker:
        """Start a worker; `limits` override the options for this worker only.

        Raises: RuntimeError: the source is closed, or the server can't start.
        """
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the {self.who} workers are closed")
            if self.server is not None and not self.server.alive:
                self.server.close()  # if its parent was killed, it still has its workers
                self.server = None
            if self.server is None:
                self.server = worker.ForkServer(self.jobs, self.who, self.options)
            return self.server.fork(**limits)

    def close(self) -> None:
        """Kill the workers, whatever they are doing, and start no more. May be called twice."""
        with self._lock:
            self._closed = True
            server, self.server = self.server, None
        if server is not None:
            server.close()


def prepared(new: Worker, *jobs: tuple[str, Mapping[str, Any]], seconds: float = START_SECONDS) -> Worker:
    """Run the jobs that prepare a new worker, each within `seconds`, and return it.

    Raises: RuntimeError: a job failed, and the worker is killed.
    """
    for job, arguments in jobs:
        result = new.run(job, arguments, seconds)
        if result is None or result.error:
            new.kill()
            raise RuntimeError((result and result.error) or "it ended at once")
    return new


class KeptWorker:
    """A worker for one thread; one that ended is replaced before the next job.

    Args:
        start: starts a worker.
    """

    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start
        self.worker: Worker | None = None
        self.deaths, self.why = 0, ""  # number of workers that have ended, and the reason of the last
        self.seconds = 0.0  # of the last job

    def run(
        self, job: str, arguments: Mapping[str, Any], seconds: float, cpu_seconds: float | None = None
    ) -> JobResult | None:
        """Run a job; see `Worker.run`. Raises what `start` raises."""
        self.worker = kept = self.worker or self._start()
        began = monotonic()
        result = kept.run(job, arguments, seconds, cpu_seconds)
        self.seconds = monotonic() - began
        if not kept.alive:
            self.worker, self.deaths = None, self.deaths + 1
            self.why = (result and result.error) or "it died between two calls"
        return result

    def replace(self) -> None:
        """Kill the worker, if there is one."""
        if self.worker is not None:
            self.worker.kill()
            self.worker = None
