"""A pool of worker processes that can be killed: jobs go in, results or one-line errors come out, in the same order.

Each slot of the pool is a daemon thread with a worker of its own. A slot sends a chunk of jobs in one write; the worker
reports the start and the end of each, so that every job has its own deadline without its own round trip. A worker that
dies or misses a deadline costs the job that it was running; its successor gets the rest of the chunk. The reply to a
job must hold the job's random id: a worker whose socket delivers anything else is killed, and its job fails. No worker
outlives the run: when this process ends, however it ends, the workers end.
"""

import asyncio
import json
import math
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

CHUNK = 64  # most jobs sent to a worker in one write
START_SECONDS = 120.0  # to load math-verify, reasoning_gym or torch on a busy machine


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
        setup: jobs that each new worker runs before its first chunk; their time counts for no other job.
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
        self._tasks: queue.SimpleQueue[tuple[Sequence[Job], Future[list[JobResult]]] | None] = queue.SimpleQueue()
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
        chunks = await asyncio.gather(*(asyncio.wrap_future(future) for future in self._submit(jobs)))
        return [result for chunk in chunks for result in chunk]

    def run_now(self, jobs: Sequence[Job]) -> list[JobResult]:
        """`run` for a caller without an event loop; blocks."""
        return [result for future in self._submit(jobs) for result in future.result()]

    def close(self) -> None:
        """Kill the workers, whatever they are doing. Chunks that are still queued fail. May be called twice."""
        with self._lock:
            self._closed = True
            server, self._fork_server = self._fork_server, None
        for _ in self._threads:
            self._tasks.put(None)
        if server is not None:
            server.close()

    def _submit(self, jobs: Sequence[Job]) -> "list[Future[list[JobResult]]]":
        """Queue the jobs in chunks, small enough that all workers finish at about the same time."""
        if not jobs:
            return []
        self.start()
        size = min(CHUNK, math.ceil(len(jobs) / self.workers))
        futures = []
        for start in range(0, len(jobs), size):
            future: Future[list[JobResult]] = Future()
            self._tasks.put((jobs[start : start + size], future))
            futures.append(future)
        return futures

    def _slot(self) -> None:
        worker: _Worker | None = None
        with suppress(Exception):  # the first job reports the same problem
            worker = self._start_worker()
        while (task := self._tasks.get()) is not None:
            jobs, future = task
            if not future.set_running_or_notify_cancel():
                continue
            results: list[JobResult] = []
            stuck = False
            while (done := len(results)) < len(jobs):
                try:
                    worker = worker or self._start_worker()
                    worker = self._work(worker, jobs[done:], results)
                    if stuck and len(results) == done:
                        results.append(JobResult(error="two workers in a row died before they started on it"))
                    stuck = len(results) == done
                except Exception as error:  # no worker could be started: this job fails, the next one tries again
                    worker = None
                    results.append(JobResult(error=f"no worker: {type(error).__name__}: {error}"))
            future.set_result(results)
        if worker is not None:
            worker.kill()

    def _work(self, worker: "_Worker", jobs: Sequence[Job], results: list[JobResult]) -> "_Worker | None":
        """Append the results of the jobs that were run. Returns the worker; None if the next job needs another one."""
        ids = [secrets.token_hex(8) for _ in jobs]
        lines = [_request(job, job_id) for job, job_id in zip(jobs, ids, strict=True)]
        sent = [line for line in lines if isinstance(line, str)]
        try:
            worker.send("[" + ",".join(sent) + "]\n", self.timeout)
        except OSError:
            worker.kill()
            return None  # it died while idle: a new worker starts with the same job
        for line, job, job_id in zip(lines, jobs, ids, strict=True):
            if isinstance(line, JobResult):
                results.append(line)
                continue
            result, alive = worker.receive(job_id, job.seconds or self.timeout, job.cpu_seconds)
            if result is not None:
                results.append(result)
            if not alive:
                return None
        worker.jobs_done += len(sent)
        if worker.jobs_done < self.recycle:
            return worker
        worker.kill()
        return None

    def _start_worker(self) -> "_Worker":
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if self._fork_server is None or not self._fork_server.alive:
                self._fork_server = _ForkServer(self._options)
            worker = self._fork_server.fork()
            self.started += 1
        for job in self.setup:
            job_id = secrets.token_hex(8)
            worker.send(f"[{_request(job, job_id)}]\n", START_SECONDS)
            result, alive = worker.receive(job_id, START_SECONDS, None)
            if result is None or result.error:
                if alive:
                    worker.kill()
                raise RuntimeError("it ended at once" if result is None else result.error)
        return worker


def _request(job: Job, job_id: str) -> str | JobResult:
    """The job as JSON, or a failed result if JSON can't hold its arguments."""
    request = {"id": job_id, "grader": job.grader, "arguments": job.arguments, "cpu_seconds": job.cpu_seconds}
    try:
        return json.dumps(request)
    except (TypeError, ValueError) as error:
        return JobResult(error=f"can't be sent to a worker: {error}")


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
        path = [os.path.abspath(entry) for entry in sys.path]
        reply = self._call(json.dumps({**options, "path": path}).encode() + b"\n")
        if "error" in reply:
            self.close()
            raise RuntimeError(f"reward workers can't start: {reply['error']}")

    @property
    def alive(self) -> bool:
        return not self._gone and self._process.poll() is None

    def fork(self) -> "_Worker":
        ours, theirs = socket.socketpair()
        try:
            reply = self._call(b'{"do": "fork"}', theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return _Worker(self, int(reply["pid"]), ours)

    def kill(self, pid: int) -> int:
        """Kill the worker if it still runs. Returns the signal that ended it, 0 if it exited by itself."""
        try:
            return int(self._call(json.dumps({"do": "kill", "pid": pid}).encode())["status"])
        except (OSError, RuntimeError):
            return 0  # the fork server is gone, and its workers with it

    def close(self) -> None:
        self._control.close()  # the fork server kills its workers, then exits
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _call(self, request: bytes, fd: int | None = None) -> dict[str, Any]:
        with self._lock:
            try:
                reply: dict[str, Any] = json.loads(self._exchange(request, fd))
            except (OSError, RuntimeError):
                self._gone = True  # the process above it may still be killing what it left behind
                raise
        return reply

    def _exchange(self, request: bytes, fd: int | None) -> bytes:
        self._control.settimeout(START_SECONDS)
        if fd is None:
            self._control.sendall(request)
        else:
            socket.send_fds(self._control, [request], [fd])
        data = b""
        while not data.endswith(b"\n"):
            part = self._control.recv(4096)
            if not part:
                raise RuntimeError("the process that starts reward workers is gone")
            data += part
        return data


class _Worker:
    """One worker process and the socket to it."""

    def __init__(self, fork_server: _ForkServer, pid: int, channel: socket.socket) -> None:
        self._fork_server, self._pid, self._channel, self._buffer = fork_server, pid, channel, b""
        self.jobs_done = 0

    def send(self, line: str, timeout: float) -> None:
        self._channel.settimeout(timeout)
        self._channel.sendall(line.encode())

    def receive(self, job_id: str, timeout: float, cpu_seconds: float | None) -> tuple[JobResult | None, bool]:
        """The result of a job, and whether the worker still lives. `timeout` counts from the previous result.

        No result from a dead worker means that it died before it began the job; another worker may run that job.
        """
        deadline, began = time.monotonic() + timeout, False
        while True:
            line = self._line(deadline)
            if line is None:
                self.kill()
                return JobResult(error=f"timed out after {timeout:g} s"), False
            if not line:
                status = self.kill()
                return JobResult(error=_death(status, cpu_seconds)) if began else None, False
            reply = _reply(line, job_id)
            if reply is None:
                self.kill()
                error = "something wrote into its worker's socket; a reward must leave open files and processes alone"
                return JobResult(error=error), False
            if "began" not in reply:
                break
            began = True
        if reply.get("last"):
            self.kill()
        return JobResult(value=reply.get("result"), error=reply.get("error")), not reply.get("last")

    def _line(self, deadline: float) -> bytes | None:
        """The next line; empty if the worker is gone, None after the deadline."""
        while b"\n" not in self._buffer:
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
        line, newline, self._buffer = self._buffer.partition(b"\n")
        return line + newline

    def kill(self) -> int:
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
