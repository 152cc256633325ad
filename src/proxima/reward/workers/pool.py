"""A pool of worker processes that can be killed: jobs go in, results or one-line errors come out, in the same order.

Its workers (`process.worker`) run one job at a time. If one dies or misses a job's deadline, only that job fails.

No maintained library passes the same tests (`tests/reward/test_pool.py`; tried: `concurrent.futures` of 3.11, loky 3.7,
Pebble 5.2). In the first two, a worker that dies fails every job in the queue, and jobs have no deadlines. Pebble has
deadlines and replaces workers, but its workers send pickles through pipes that all of them share: a job that writes
to its open files can make the run itself execute what it wrote, or stop the pool for good; and a worker that hangs
outlives a run that was killed.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from proxima.data import as_field_errors
from proxima.process.sandbox import CodeServers, SandboxMissing, brought_kind
from proxima.process.worker import ForkServer, JobResult, KeptWorker, Worker, WorkerQueue
from proxima.reward.base import Job

GRADERS = "proxima.reward.workers.graders"
NO_SERVERS: Mapping[str, int] = {}
RECYCLE = 5000  # jobs after which a worker is replaced


class WorkerPool:
    """Runs jobs in worker processes, each with a timeout.

    Args:
        workers: worker processes.
        timeout: wall-clock seconds for one job. A job's `cpu_seconds` applies as well.
        warm_ups: run once before workers are forked; see `ForkServer`.
        setup: jobs that each new worker runs before its first job; their time is not charged to any other job.
        restricted: workers can't write files, open connections or start processes.
        memory_mb: memory limit, in MiB, of a worker beyond its usage at its start; 0: none. It limits the address space
            if `restricted`, else the memory that the worker writes.
        sandbox: of the workers, a `process.sandbox.Sandbox`; None: none.
        code_servers: the kinds of sandboxes that other distributions bring in which the workers run code, as many at
            once as workers, and the MiB that it may need there.

    `start` or the first `run` starts the processes. `run` may be called from several event loops.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        timeout: float = 10.0,
        warm_ups: Sequence[str] = (),
        setup: Sequence[Job] = (),
        restricted: bool = True,
        memory_mb: int = 1024,
        sandbox: Any = None,
        code_servers: Mapping[str, int] = NO_SERVERS,
    ) -> None:
        self.timeout = timeout
        self.setup = tuple(setup)
        options = {"warm_ups": sorted(warm_ups), "restricted": restricted, "memory_mb": memory_mb}
        slow = {job.grader: f"reward {job.arguments.get('path', job.grader)}: loading it" for job in setup}
        self._server = ForkServer(GRADERS, "reward", options, slow, sandbox)
        self._workers = workers
        self._code_servers = code_servers
        self._code_lock = threading.Lock()
        self._code: dict[str, CodeServers] = {}
        self._queue = WorkerQueue(self._start_worker, workers)

    @property
    def started(self) -> int:
        """The number of workers so far."""
        return sum(kept.started for kept in self._queue.kept)

    def check(self) -> None:
        """Start the servers by which the workers run code, if there are any.

        Raises:
            FieldError: they can't be started.
        """
        with self._code_lock:
            for name, memory_mb in self._code_servers.items():
                if name in self._code:
                    continue
                kind = brought_kind(name)
                if kind is not None:
                    with as_field_errors(SandboxMissing):
                        self._code[name] = kind.code_servers(self._workers, memory_mb)

    def start(self) -> None:
        """Start the workers before the first `run`; returns at once."""
        for _ in self._queue.kept:
            self._queue.submit(KeptWorker.ready)  # the first job reports what goes wrong

    async def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """The result of each job, in the same order. An exception in a job is never raised here."""
        return list(await asyncio.gather(*map(asyncio.wrap_future, self._submit(jobs))))

    def run_now(self, jobs: Sequence[Job]) -> list[JobResult]:
        """`run` for a caller without an event loop; blocks."""
        return [future.result() for future in self._submit(jobs)]

    def close(self) -> None:
        """Kill the workers, even if they are busy. Jobs that are still queued fail. May be called twice."""
        self._queue.close()
        self._server.close()
        with self._code_lock:
            for servers in self._code.values():
                servers.close()

    def _submit(self, jobs: Sequence[Job]) -> "list[Future[JobResult]]":
        return [self._queue.submit(partial(self._run, job)) for job in jobs]

    def _run(self, job: Job, kept: KeptWorker) -> JobResult:
        try:
            result = kept.run(job.grader, job.arguments, job.seconds or self.timeout, job.cpu_seconds)
        except Exception as error:  # no worker could be started: this job fails, the next one tries again
            return JobResult(error=f"no worker: {type(error).__name__}: {error}")
        if kept.worker is not None and kept.worker.jobs_done >= RECYCLE:
            kept.replace()
        return result

    def _start_worker(self) -> Worker:
        self.check()
        code = [("use_servers", {"kind": kind, "address": made.address}) for kind, made in self._code.items()]
        return self._server.fork(*code, *((job.grader, job.arguments) for job in self.setup))
