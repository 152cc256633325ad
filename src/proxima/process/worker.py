"""Worker processes that can be killed and replaced, used by rewards and environments: the run's side.

A worker gets one job at a time. The reply to a job must hold the job's random id: a worker whose socket delivers
anything else is killed, and its job fails. No worker outlives the run: when this process ends, for whatever reason, so
do the workers.
"""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from proxima.process.children import ONE_THREAD, Child, start_module
from proxima.process.exit_status import signal_name
from proxima.process.json_lines import LineChannel
from proxima.process.sandbox import SandboxMissing

if TYPE_CHECKING:  # few workers run in one
    from proxima.process.sandbox import ModuleStarter, Sandbox

START_SECONDS = 600.0  # to load math-verify, reasoning_gym or torch on a busy machine
FORK_SERVER = "proxima.process.fork_server"
SLOW_SECONDS = 30.0  # after which a start that takes longer is reported
REPLY_BYTES = 1 << 26  # of a reply; a worker that writes more is killed
T = TypeVar("T")


@dataclass(frozen=True)
class JobResult:
    """The value that a job returned, or a one-line error."""

    value: Mapping[str, Any] | None = None
    error: str | None = None


class ForkServer:
    """Forks the workers of one purpose, in a process of its own (`fork_server.fork_server`), whose parent outlives it.
    The process starts with the first worker, and again if it has died.

    Args:
        jobs: the module with the functions that workers run, in a table `JOBS`; importing it must not load torch.
        who: the workers' purpose, as in "reward workers can't start".
        options: `warm_ups`, modules to import once before workers are forked, or `module:function` to call;
            `restricted` and `memory_mb`, the limits of a worker.
        slow: what a job does, by its name, for a line on the standard error when it takes long: once for each.
        sandbox: in which the process and all workers run; None: in none.
    """

    def __init__(
        self,
        jobs: str,
        who: str,
        options: Mapping[str, Any],
        slow: Mapping[str, str] = MappingProxyType({}),
        sandbox: "Sandbox | None" = None,
    ) -> None:
        self.jobs = jobs
        self.who = who
        self.options = options
        self.slow = dict(slow)
        self.sandbox = sandbox
        self.closed = False
        self.child: Child | None = None
        self._starter: ModuleStarter | None = None
        self._lock = threading.Lock()

    def fork(self, *setup: tuple[str, Mapping[str, Any]], seconds: float = START_SECONDS, **limits: Any) -> "Worker":
        """Start a worker and prepare it.

        Args:
            setup: jobs that it runs first, each within `seconds`.
            limits: override the options for this worker only.
        Raises: RuntimeError: the server is closed or can't start, or a job failed, and the worker is killed.
        """
        with self._lock:
            child = self._started()
            ours, theirs = socket.socketpair()
            try:
                reply = self._call({"do": "fork", **limits}, theirs.fileno())
            except BaseException:
                ours.close()
                raise
            finally:
                theirs.close()
        worker = Worker(self, child, int(reply["pid"]), ours)
        for job, arguments in setup:
            result = worker.run(job, arguments, seconds)
            if result is None or result.error:
                worker.kill()
                raise RuntimeError((result and result.error) or "it ended at once")
        worker.jobs_done = 0
        return worker

    def kill(self, child: Child, pid: int) -> int:
        """Kill a worker that `child` has forked; see `Worker.kill`."""
        with self._lock:
            if child is not self.child:
                return 0  # that process is gone, and its workers with it
            try:
                return int(self._call({"do": "kill", "pid": pid})["status"])
            except RuntimeError:
                return 0

    def report_slow(self, job: str, most: float) -> None:
        """Report on the standard error, once for each job, that it takes long; it is given up after `most` seconds."""
        what = self.slow.pop(job, None)
        if what:
            line = f"{what} has taken {SLOW_SECONDS:g} s so far; it is given up after {most:g} s"
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Kill the workers, whatever they are doing, and start no more. May be called twice."""
        with self._lock:
            self.closed = True
            self._end()
            if self._starter is not None:
                self._starter.close()

    def _started(self) -> Child:
        """The process, which is started if there is none."""
        if self.closed:
            raise RuntimeError(f"the {self.who} workers are closed")
        if self.child is not None and self.child.process.poll() is not None:
            self._end()  # it was killed, and what it has forked may still run
        if self.child is None:
            given = os.environ if self.sandbox is None else self.sandbox.variables
            self.child = self._start({**given, **ONE_THREAD, "PYTHONDONTWRITEBYTECODE": "1"})
            self._control = LineChannel(self.child.channel)
            path = list(map(os.path.abspath, sys.path))
            if self.sandbox:
                path.append(os.getcwd())
            reply = self._call({**self.options, "jobs": self.jobs, "path": path})
            if "error" in reply:
                self._end()
                raise RuntimeError(f"{self.who} workers can't start: {reply['error']}")
        return self.child

    def _start(self, environment: Mapping[str, str]) -> Child:
        if self.sandbox is None:
            return start_module(FORK_SERVER, env=environment)
        try:
            self._starter = self._starter or self.sandbox.starter()
            if self._starter is None:
                return start_module(FORK_SERVER, env=environment, sandbox=self.sandbox)
            child: Child = self._starter.start(FORK_SERVER, environment)
            return child
        except SandboxMissing as error:
            raise RuntimeError(f"{self.who} workers can't start: {error}") from error

    def _call(self, request: Mapping[str, Any], fd: int | None = None) -> dict[str, Any]:
        """Send a request, and `fd` if given, and return the reply; RuntimeError if the process is gone."""
        assert self.child is not None
        self.child.process.send_signal(signal.SIGCONT)  # a job may have stopped it
        fds = () if fd is None else (fd,)
        try:
            self._control.send(request, fds)
            reply: dict[str, Any] = self._control.receive(time.monotonic() + START_SECONDS)
        except (EOFError, OSError, ValueError) as error:
            self._end()
            why = "is gone"
            if isinstance(error, TimeoutError):
                why = f"did not answer within {START_SECONDS:g} s"
            raise RuntimeError(f"the process that starts {self.who} workers {why}") from error
        return reply

    def _end(self) -> None:
        """End the process: it kills its workers, then exits. If it was killed, its parent does that."""
        if self.child is not None:
            self.child.end(5.0)
            self.child = None


class Worker:
    """One worker process and the socket to it.

    Args:
        server, child: its fork server, and that server's process, which has forked it.
    """

    def __init__(self, server: ForkServer, child: Child, pid: int, channel: socket.socket) -> None:
        self._server = server
        self._child = child
        self.pid = pid
        self._channel = LineChannel(channel, REPLY_BYTES)
        self.jobs_done = 0
        self.alive = True

    def run(
        self, job: str, arguments: Mapping[str, Any], seconds: float, cpu_seconds: float | None = None
    ) -> JobResult | None:
        """Run a job of the table `JOBS` within `seconds` and return its result; None if the worker had already died."""
        job_id = secrets.token_hex(8)
        request = {"id": job_id, "job": job, "arguments": arguments, "cpu_seconds": cpu_seconds}
        deadline = time.monotonic() + seconds
        try:
            self._channel.connection.settimeout(seconds)
            self._channel.send(request)
        except OSError:
            self.kill()
            return None
        except (TypeError, ValueError) as error:
            return JobResult(error=f"can't be sent to a worker: {error}")
        self.jobs_done += 1
        try:
            reply = self._reply(job, deadline - seconds, deadline)
            if reply["id"] != job_id:
                raise ValueError("a reply to something else")
        except TimeoutError:
            self.kill()
            return JobResult(error=f"timed out after {seconds:g} s")
        except (EOFError, OSError):
            return JobResult(error=_death(self.kill(), cpu_seconds))
        except (LookupError, TypeError, ValueError):
            self.kill()
            who = self._server.who
            why = f"something wrote into its worker's socket; a {who} must leave open files and processes alone"
            return JobResult(error=why)
        if reply.get("last"):
            self.kill()
        return JobResult(value=reply.get("result"), error=reply.get("error"))

    def _reply(self, job: str, began: float, deadline: float) -> Any:
        """Wait for the reply to a job, and report one that takes long."""
        if job in self._server.slow and deadline > began + SLOW_SECONDS:
            try:
                return self._channel.receive(began + SLOW_SECONDS)
            except TimeoutError:
                self._server.report_slow(job, deadline - began)
        return self._channel.receive(deadline)

    def kill(self) -> int:
        """Kill the worker if it is still running. Returns the signal that ended it, 0 if it exited by itself."""
        if not self.alive:
            return 0
        self.alive = False
        self._channel.connection.close()
        return self._server.kill(self._child, self.pid)


def _death(status: int, cpu_seconds: float | None) -> str:
    if status == signal.SIGPROF:
        return f"timed out after {cpu_seconds:g} s of CPU time"
    if status:
        return f"its worker died ({signal_name(status)})"
    return "its worker ended"


class KeptWorker:
    """A worker for one thread; one that ended is replaced before the next job.

    Args:
        start: starts a worker.
    """

    def __init__(self, start: Callable[[], Worker]) -> None:
        self._start = start
        self.worker: Worker | None = None
        self.started = 0  # number of workers so far
        self.deaths = 0  # number of workers that have died
        self.why = ""  # the reason of the last

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
        attempts = 2 if again else 1
        for _ in range(attempts):
            kept = self.ready()
            limit = seconds if first_seconds is None or kept.jobs_done else first_seconds
            result = kept.run(job, arguments, limit, cpu_seconds)
            if not kept.alive:
                self.worker = None
                self.deaths += 1
                self.why = (result and result.error) or "it died between two calls"
            if result is not None:
                return result
        if again:
            died = "two workers in a row died before they started on it"
        else:
            died = "its worker died between two calls"
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
        self._begun = False
        self._closed = False

    def submit(self, call: Callable[[KeptWorker], T]) -> "Future[T]":
        """Queue a call, which gets the worker that is free. RuntimeError after `close`."""
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers are closed")
            if not self._begun:
                for kept in self.kept:
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
