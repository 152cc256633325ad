"""A pool of worker processes that can be killed: jobs go in, results or one-line errors come out, in the same order.

Each slot of the pool is a daemon thread with a worker of its own, which gets one job at a time. A worker that dies or
misses a job's deadline costs that job alone. The reply to a job must hold the job's random id: a worker whose socket
delivers anything else is killed, and its job fails. No worker outlives the run: when this process ends, however it
ends, the workers end.

No kept library passes the same tests (`tests/reward/test_pool.py`; tried: `concurrent.futures` of 3.11, loky 3.7,
Pebble 5.2). In the first two a worker that ends fails every job in the queue, and no job has a deadline. Pebble has
deadlines and replaces workers, but its workers send pickles through pipes that all of them share: a job that writes
into its open files makes the run itself execute what it wrote, or stops the pool for good; and a worker that hangs
outlives a run that was killed.
"""

import asyncio
import json
import os
import queue
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import require
from proxima.reward.base import Job

START_SECONDS = 120.0  # to load math-verify, reasoning_gym or torch on a busy machine
REPLY_BYTES = 1 << 26  # of a reply; a worker that writes more is killed


@dataclass(frozen=True)
class JobResult:
    """The value that a job returned, or a one-line error."""

    value: Mapping[str, Any] | None = None
    error: str | None = None


class WorkerPool:
    """Runs jobs in worker processes, each with a timeout.

    Args:
        workers: worker processes; >= 1.
        timeout: wall-clock seconds for one job; > 0. A job's `cpu_seconds` applies as well.
        warm_ups: keys of `graders.WARM_UPS`, run once before workers are forked.
        setup: jobs that each new worker runs before its first job; their time counts for no other job.
        restricted: workers write no files, open no connections and start no processes.
        memory_mb: memory limit, in MiB, of a worker beyond what it holds at its start; 0: none. Of address space where
            `restricted`, else of memory that it writes.
        recycle: jobs after which a worker is replaced.

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
        recycle: int = 5000,
    ) -> None:
        require(workers >= 1, "workers", workers, "must be >= 1")
        require(timeout > 0, "timeout", timeout, "must be > 0 seconds")
        self.workers, self.timeout, self.recycle, self.setup = workers, timeout, recycle, tuple(setup)
        self._options = {"warm_ups": sorted(warm_ups), "restricted": restricted, "memory_mb": memory_mb}
        self._tasks: queue.SimpleQueue[tuple[Job, Future[JobResult]] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._fork_server: _ForkServer | None = None
        self._lock = threading.Lock()
        self._closed = False
        self.started = 0  # workers forked so far

    def start(self) -> None:
        """Start the workers ahead of the first `run`; returns at once."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            while len(self._threads) < self.workers:
                thread = threading.Thread(target=self._slot, name=f"reward-slot-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()

    async def run(self, jobs: Sequence[Job]) -> list[JobResult]:
        """The result of each job, in the same order. Never raises for what a job does."""
        return list(await asyncio.gather(*map(asyncio.wrap_future, self._submit(jobs))))

    def run_now(self, jobs: Sequence[Job]) -> list[JobResult]:
        """`run` for a caller without an event loop; blocks."""
        return [future.result() for future in self._submit(jobs)]

    def close(self) -> None:
        """Kill the workers, whatever they are doing. Jobs that are still queued fail. May be called twice."""
        with self._lock:
            self._closed = True
            server, self._fork_server = self._fork_server, None
        for _ in self._threads:
            self._tasks.put(None)
        if server is not None:
            server.close()

    def _submit(self, jobs: Sequence[Job]) -> "list[Future[JobResult]]":
        if jobs:
            self.start()
        futures: list[Future[JobResult]] = [Future() for _ in jobs]
        for task in zip(jobs, futures, strict=True):
            self._tasks.put(task)
        return futures

    def _slot(self) -> None:
        worker: _Worker | None = None
        with suppress(Exception):  # the first job reports the same problem
            worker = self._start_worker()
        while (task := self._tasks.get()) is not None:
            job, future = task
            if future.set_running_or_notify_cancel():
                result, worker = self._run(job, worker)
                future.set_result(result)
        if worker is not None:
            worker.kill()

    def _run(self, job: Job, worker: "_Worker | None") -> "tuple[JobResult, _Worker | None]":
        """The result of a job, and the worker for the next one; None if that needs another."""
        result = None
        while result is None:  # a worker that died while it was idle is replaced
            try:
                worker = worker or self._start_worker()
                result = worker.run(job, self.timeout)
            except Exception as error:  # no worker could be started: this job fails, the next one tries again
                return JobResult(error=f"no worker: {type(error).__name__}: {error}"), None
            if worker.jobs_done >= self.recycle:
                worker.kill()
            worker = worker if worker.alive else None
        return result, worker

    def _start_worker(self) -> "_Worker":
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if self._fork_server is None or not self._fork_server.alive:
                self._fork_server = _ForkServer(self._options)
            worker = self._fork_server.fork()
            self.started += 1
        for job in self.setup:
            result = worker.run(job, START_SECONDS)
            if result is None or result.error:
                worker.kill()
                raise RuntimeError("it ended at once" if result is None else result.error)
        return worker


class _ForkServer:
    """The process that forks the workers (`process.fork_server`), below one that outlives it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._control, theirs = socket.socketpair()
        self._gone = False
        self._lock = threading.Lock()
        command = [sys.executable, "-P", str(Path(__file__).with_name("process.py")), str(theirs.fileno())]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches the run alone, which then ends the workers
            env={**os.environ, **threads, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        theirs.close()
        self._control.settimeout(START_SECONDS)
        self._replies = self._control.makefile("rb")
        path = [os.path.abspath(entry) for entry in sys.path]
        reply = self._call({**options, "path": path})
        if "error" in reply:
            self.close()
            raise RuntimeError(f"reward workers can't start: {reply['error']}")

    @property
    def alive(self) -> bool:
        return not self._gone and self._process.poll() is None

    def fork(self) -> "_Worker":
        ours, theirs = socket.socketpair()
        try:
            reply = self._call({"do": "fork"}, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return _Worker(self, int(reply["pid"]), ours)

    def kill(self, pid: int) -> int:
        """See `_Worker.kill`."""
        try:
            return int(self._call({"do": "kill", "pid": pid})["status"])
        except RuntimeError:
            return 0  # the fork server is gone, and its workers with it

    def close(self) -> None:
        self._replies.close()
        self._control.close()  # the fork server kills its workers, then exits
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, request: Mapping[str, Any], fd: int | None = None) -> dict[str, Any]:
        """The reply to a request, with which the server gets a file; RuntimeError if it is gone."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                if fd is None:
                    self._control.sendall(line)
                else:
                    socket.send_fds(self._control, [line], [fd])
                reply: dict[str, Any] = json.loads(self._replies.readline())
            except (OSError, ValueError) as error:
                self._gone = True  # the process above it may still be killing what it left behind
                raise RuntimeError("the process that starts reward workers is gone") from error
        return reply


class _Worker:
    """One worker process and the socket to it."""

    def __init__(self, fork_server: _ForkServer, pid: int, channel: socket.socket) -> None:
        self._fork_server, self._pid, self._channel, self._buffer = fork_server, pid, channel, bytearray()
        self.jobs_done, self.alive = 0, True

    def run(self, job: Job, timeout: float) -> JobResult | None:
        """The result of a job, within its own time limit or `timeout` seconds; None if the worker had died before."""
        job_id, seconds = secrets.token_hex(8), job.seconds or timeout
        request = {"id": job_id, "grader": job.grader, "arguments": job.arguments, "cpu_seconds": job.cpu_seconds}
        try:
            line = json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError) as error:
            return JobResult(error=f"can't be sent to a worker: {error}")
        deadline = time.monotonic() + seconds
        try:
            self._channel.settimeout(seconds)
            self._channel.sendall(line)
        except OSError:
            self.kill()
            return None
        self.jobs_done += 1
        answer = self._line(deadline)
        if answer is None:
            self.kill()
            return JobResult(error=f"timed out after {seconds:g} s")
        if not answer:
            return JobResult(error=_death(self.kill(), job.cpu_seconds))
        reply = _reply(answer, job_id)
        if reply is None or reply.get("last"):
            self.kill()
        if reply is None:
            why = "something wrote into its worker's socket; a reward must leave open files and processes alone"
            return JobResult(error=why)
        return JobResult(value=reply.get("result"), error=reply.get("error"))

    def _line(self, deadline: float) -> bytes | None:
        """The next line, or its beginning where it is too long; empty if the worker is gone, None after the
        deadline."""
        while b"\n" not in self._buffer and len(self._buffer) <= REPLY_BYTES:
            remaining = deadline - time.monotonic()
            if remaining <= 0 or not select.select([self._channel], [], [], remaining)[0]:
                return None
            try:
                part = self._channel.recv(1 << 16)
            except OSError:
                part = b""
            if not part:
                return b""
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return bytes(line) or b"\n"

    def kill(self) -> int:
        """Kill the worker if it still runs. Returns the signal that ended it, 0 if it exited by itself."""
        if not self.alive:
            return 0
        self.alive = False
        self._channel.close()
        return self._fork_server.kill(self._pid)


def _reply(line: bytes, job_id: str) -> dict[str, Any] | None:
    """A worker's report on the job; None if the line is none."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) and reply.get("id") == job_id else None


def _death(status: int, cpu_seconds: float | None) -> str:
    if status == signal.SIGPROF:
        return f"timed out after {cpu_seconds:g} s of CPU time"
    return f"its worker died ({signal.Signals(status).name})" if status else "its worker ended"
