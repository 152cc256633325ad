"""A pool of worker processes that can be killed: text goes in as jobs, results or one-line errors come out, in the same
order.

Each slot of the pool is a daemon thread with a worker of its own. A slot sends a chunk of jobs in one write and hears
of each when it begins and when it ends, so that every job has its own deadline without a round trip of its own. A
worker that dies or passes the deadline costs the job it was at; the rest of the chunk goes to its successor. Each job
has a random id that its answer must
hold: a worker from whose socket comes anything else is ended, and the job it was at has no answer. Nothing here
outlives the run: when this process ends, so do the workers.
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

CHUNK = 64  # jobs sent to a worker in one write at most
START_SECONDS = 120.0  # to load math-verify, reasoning_gym or torch on a busy machine


@dataclass(frozen=True)
class Answer:
    """What became of a job: its result, or why there is none, in one line."""

    result: Mapping[str, Any] | None = None
    error: str | None = None


class WorkerPool:
    """Runs jobs in worker processes, each within a time-out.

    Args:
        workers: worker processes; >= 1.
        timeout: seconds on the clock for one job; > 0. A job's `cpu_seconds` holds beside it.
        warm: keys of `graders.WARM`, loaded once before workers are forked.
        setup: jobs done by each new worker before its first chunk, outside of any job's time.
        restricted: memory limit, no files written, no connections, no processes.
        memory_mb: MiB a restricted worker may take beyond what it starts with.
        recycle: jobs after which a worker is replaced.

    Processes are started by `start` or the first `run`. `run` may be called from any event loop, and from several.
    """

    def __init__(
        self,
        workers: int = 1,
        *,
        timeout: float = 10.0,
        warm: Sequence[str] = (),
        setup: Sequence[Job] = (),
        restricted: bool = True,
        memory_mb: int = 1024,
        recycle: int = 5000,
    ) -> None:
        require(workers >= 1, "workers", workers, "must be >= 1")
        require(timeout > 0, "timeout", timeout, "must be > 0 seconds")
        self.workers, self.timeout, self.recycle, self.setup = workers, timeout, recycle, tuple(setup)
        self._options = {"warm": sorted(warm), "restricted": restricted, "memory_mb": memory_mb}
        self._tasks: queue.SimpleQueue[tuple[Sequence[Job], Future[list[Answer]]] | None] = queue.SimpleQueue()
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

    async def run(self, jobs: Sequence[Job]) -> list[Answer]:
        """An answer for each job, in the same order. Never raises for what a job does."""
        chunks = await asyncio.gather(*(asyncio.wrap_future(future) for future in self._submit(jobs)))
        return [answer for chunk in chunks for answer in chunk]

    def run_now(self, jobs: Sequence[Job]) -> list[Answer]:
        """`run` for a caller without an event loop; waits."""
        return [answer for future in self._submit(jobs) for answer in future.result()]

    def close(self) -> None:
        """End the workers, whatever they are doing. Chunks not yet begun are answered `closed`. May be called twice."""
        with self._lock:
            self._closed = True
            nursery, self._fork_server = self._fork_server, None
        for _ in self._threads:
            self._tasks.put(None)
        if nursery is not None:
            nursery.close()

    def _submit(self, jobs: Sequence[Job]) -> "list[Future[list[Answer]]]":
        """Chunks for all workers, small enough that none waits long for the others at the end."""
        if not jobs:
            return []
        self.start()
        size = min(CHUNK, math.ceil(len(jobs) / self.workers))
        futures = []
        for start in range(0, len(jobs), size):
            future: Future[list[Answer]] = Future()
            self._tasks.put((jobs[start : start + size], future))
            futures.append(future)
        return futures

    def _slot(self) -> None:
        worker: _Worker | None = None
        with suppress(Exception):  # said again, and loudly, by the first job
            worker = self._hire()
        while (task := self._tasks.get()) is not None:
            jobs, future = task
            if not future.set_running_or_notify_cancel():
                continue
            answers: list[Answer] = []
            again = False
            while (done := len(answers)) < len(jobs):
                try:
                    worker = worker or self._hire()
                    worker = self._work(worker, jobs[done:], answers)
                    if again and len(answers) == done:
                        answers.append(Answer(error="two workers in a row ended before they began with it"))
                    again = len(answers) == done
                except Exception as problem:  # no worker to be had: the job pays, the pool tries again with the next
                    worker = None
                    answers.append(Answer(error=f"no worker: {type(problem).__name__}: {problem}"))
            future.set_result(answers)
        if worker is not None:
            worker.end()

    def _work(self, worker: "_Worker", jobs: Sequence[Job], answers: list[Answer]) -> "_Worker | None":
        """Add an answer for each job done; the worker, or None when it is gone and the rest of the jobs needs
        another."""
        ids = [secrets.token_hex(8) for _ in jobs]
        lines = [_line_of(job, one) for job, one in zip(jobs, ids, strict=True)]
        sent = [line for line in lines if isinstance(line, str)]
        try:
            worker.send("[" + ",".join(sent) + "]\n", self.timeout)
        except OSError:
            worker.end()
            return None  # it died while idle; nobody's fault, and a new one starts from the same job
        for line, job, one in zip(lines, jobs, ids, strict=True):
            if isinstance(line, Answer):
                answers.append(line)
                continue
            answer, alive = worker.receive(one, job.seconds or self.timeout, job.cpu_seconds)
            if answer is not None:
                answers.append(answer)
            if not alive:
                return None
        worker.done += len(sent)
        if worker.done < self.recycle:
            return worker
        worker.end()
        return None

    def _hire(self) -> "_Worker":
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed")
            if self._fork_server is None or not self._fork_server.alive:
                self._fork_server = _ForkServer(self._options)
            worker = self._fork_server.fork()
            self.started += 1
        for job in self.setup:
            one = secrets.token_hex(8)
            worker.send(f"[{_line_of(job, one)}]\n", START_SECONDS)
            answer, alive = worker.receive(one, START_SECONDS, None)
            if answer is None or answer.error:
                if alive:
                    worker.end()
                raise RuntimeError("it ended at once" if answer is None else answer.error)
        return worker


def _line_of(job: Job, one: str) -> str | Answer:
    try:
        return json.dumps({"id": one, "grader": job.grader, "arguments": job.arguments, "cpu_seconds": job.cpu_seconds})
    except (TypeError, ValueError) as problem:
        return Answer(error=f"can't be sent to a worker: {problem}")


class _ForkServer:
    """The process that forks the workers (`worker.nursery`)."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._control, theirs = socket.socketpair()
        self._lock = threading.Lock()
        command = [sys.executable, "-P", str(Path(__file__).with_name("process.py")), str(theirs.fileno())]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C in the terminal is the run's business: it ends the workers when it is done with them
            start_new_session=True,
            env={**os.environ, **threads, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        theirs.close()
        path = [os.path.abspath(entry) for entry in sys.path]
        answer = self._ask(json.dumps({**options, "path": path}).encode() + b"\n", START_SECONDS)
        if "error" in answer:
            self.close()
            raise RuntimeError(f"reward workers can't start: {answer['error']}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(self) -> "_Worker":
        ours, theirs = socket.socketpair()
        try:
            answer = self._ask(b'{"do": "fork"}', START_SECONDS, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return _Worker(self, int(answer["pid"]), ours)

    def end(self, pid: int) -> int:
        """Kill the worker if it still runs, and say which signal ended it (0: it ended by itself)."""
        try:
            return int(self._ask(json.dumps({"do": "end", "pid": pid}).encode(), START_SECONDS)["status"])
        except (OSError, RuntimeError):
            return 0  # the nursery is gone, and its workers with it

    def close(self) -> None:
        self._control.close()  # the nursery ends its workers, then itself
        try:
            self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: bytes, timeout: float, fd: int | None = None) -> dict[str, Any]:
        with self._lock:
            self._control.settimeout(timeout)
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
        answer: dict[str, Any] = json.loads(data)
        return answer


class _Worker:
    """One worker process and the socket to it."""

    def __init__(self, nursery: _ForkServer, pid: int, channel: socket.socket) -> None:
        self._fork_server, self._pid, self._channel, self._buffer = nursery, pid, channel, b""
        self.done = 0

    def send(self, line: str, timeout: float) -> None:
        self._channel.settimeout(timeout)
        self._channel.sendall(line.encode())

    def receive(self, one: str, timeout: float, cpu_seconds: float | None) -> tuple[Answer | None, bool]:
        """The answer to the job of the id `one`, and whether the worker still lives. `timeout` counts from the answer
        before.

        No answer, and a worker that is gone: it ended before it began with the job, which may be done by another.
        """
        deadline, begun = time.monotonic() + timeout, False
        while True:
            line = self._line(deadline)
            if line is None:
                self.end()
                return Answer(error=f"timed out after {timeout:g} s"), False
            if not line:
                status = self.end()
                return Answer(error=_cause(status, cpu_seconds)) if begun else None, False
            said = _said(line, one)
            if said is None:
                self.end()
                return Answer(
                    error="something wrote into its worker's socket; a reward must leave open files and forked "
                    "processes alone"
                ), False
            if "begun" not in said:
                break
            begun = True
        if said.get("last"):
            self.end()
        return Answer(result=said.get("result"), error=said.get("error")), not said.get("last")

    def _line(self, deadline: float) -> bytes | None:
        """The next line; empty where the worker is gone, None where none came in time."""
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

    def end(self) -> int:
        self._channel.close()
        return self._fork_server.end(self._pid)


def _said(line: bytes, one: str) -> dict[str, Any] | None:
    """What a line says of the job of the id `one`; None where it is not the worker's word on it."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) and said.get("id") == one else None


def _cause(status: int, cpu_seconds: float | None) -> str:
    if status == signal.SIGPROF:
        return f"timed out after {cpu_seconds:g} s of CPU time"
    return f"its worker died ({signal.Signals(status).name})" if status else "its worker ended"
