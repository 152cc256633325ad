"""Worker processes that can be killed, used by rewards and environments: the run's side.

A worker gets one job at a time. The reply to a job must hold the job's random id: a worker whose socket delivers
anything else is killed, and its job fails. No worker outlives the run: when this process ends, for whatever reason, so
do the workers.
"""

import json
import os
import secrets
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxima.process.kill import wait_or_kill
from proxima.process.start import start_module

START_SECONDS = 120.0  # to load math-verify, reasoning_gym or torch on a busy machine
FORK_SERVER = "proxima.process.fork_server"
REPLY_BYTES = 1 << 26  # of a reply; a worker that writes more is killed


@dataclass(frozen=True)
class JobResult:
    """The value that a job returned, or a one-line error."""

    value: Mapping[str, Any] | None = None
    error: str | None = None


class ForkServer:
    """The process that forks the workers (`fork_server.fork_server`), whose parent outlives it.

    Args:
        jobs: the module with the functions that workers run, in a table `JOBS`; importing it must not load torch.
        who: the workers' purpose, as in "reward workers can't start".
        options: `warm_ups`, modules to import once before workers are forked, or `module:function` to call;
            `restricted` and `memory_mb`, the limits of a worker.
    """

    def __init__(self, jobs: str, who: str, options: Mapping[str, Any]) -> None:
        self.who = who
        self._gone = False
        self._lock = threading.Lock()
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        environment = {**os.environ, **threads, "PYTHONDONTWRITEBYTECODE": "1"}
        self._process, self._control = start_module(FORK_SERVER, env=environment)
        self._control.settimeout(START_SECONDS)
        self._replies = self._control.makefile("rb")
        path = [os.path.abspath(entry) for entry in sys.path]
        try:
            reply = self._call({**options, "jobs": jobs, "path": path})
            if "error" in reply:
                raise RuntimeError(f"{who} workers can't start: {reply['error']}")
        except RuntimeError:
            self.close()
            raise

    @property
    def alive(self) -> bool:
        return not self._gone and self._process.poll() is None

    def fork(self, **limits: Any) -> "Worker":
        """Start a worker; `limits` override the options for this worker only."""
        ours, theirs = socket.socketpair()
        try:
            reply = self._call({"do": "fork", **limits}, theirs.fileno())
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        return Worker(self, int(reply["pid"]), ours)

    def kill(self, pid: int) -> int:
        """See `Worker.kill`."""
        try:
            return int(self._call({"do": "kill", "pid": pid})["status"])
        except RuntimeError:
            return 0  # the fork server is gone, and its workers with it

    def close(self) -> None:
        self._replies.close()
        self._control.close()  # the fork server kills its workers, then exits
        wait_or_kill(self._process, 5.0)

    def _call(self, request: Mapping[str, Any], fd: int | None = None) -> dict[str, Any]:
        """Send a request, and `fd` if given, and return the reply; RuntimeError if the server is gone."""
        line = json.dumps(request).encode() + b"\n"
        with self._lock:
            try:
                if fd is None:
                    self._control.sendall(line)
                else:
                    socket.send_fds(self._control, [line], [fd])
                reply: dict[str, Any] = json.loads(self._replies.readline())
            except (OSError, ValueError) as error:
                self._gone = True  # its parent may still be killing the processes it left behind
                late = f"did not answer within {START_SECONDS:g} s" if isinstance(error, TimeoutError) else "is gone"
                raise RuntimeError(f"the process that starts {self.who} workers {late}") from error
        return reply


class Worker:
    """One worker process and the socket to it."""

    def __init__(self, fork_server: ForkServer, pid: int, channel: socket.socket) -> None:
        self._fork_server, self._pid, self._channel, self._buffer = fork_server, pid, channel, bytearray()
        self.jobs_done, self.alive = 0, True

    def run(
        self, job: str, arguments: Mapping[str, Any], seconds: float, cpu_seconds: float | None = None
    ) -> JobResult | None:
        """Run a job of the table `JOBS` within `seconds` and return its result; None if the worker had already died."""
        job_id = secrets.token_hex(8)
        request = {"id": job_id, "job": job, "arguments": arguments, "cpu_seconds": cpu_seconds}
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
            return JobResult(error=_death(self.kill(), cpu_seconds))
        reply = _reply(answer, job_id)
        if reply is None or reply.get("last"):
            self.kill()
        if reply is None:
            who = self._fork_server.who
            why = f"something wrote into its worker's socket; a {who} must leave open files and processes alone"
            return JobResult(error=why)
        return JobResult(value=reply.get("result"), error=reply.get("error"))

    def _line(self, deadline: float) -> bytes | None:
        """The next line, or its beginning if it is too long; empty if the worker is gone, None after the deadline."""
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
        """Kill the worker if it is still running. Returns the signal that ended it, 0 if it exited by itself."""
        if not self.alive:
            return 0
        self.alive = False
        self._channel.close()
        return self._fork_server.kill(self._pid)


def _reply(line: bytes, job_id: str) -> dict[str, Any] | None:
    """A worker's reply to the job; None if the line is not one."""
    try:
        reply = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return reply if isinstance(reply, dict) and reply.get("id") == job_id else None


def _death(status: int, cpu_seconds: float | None) -> str:
    if status == signal.SIGPROF:
        return f"timed out after {cpu_seconds:g} s of CPU time"
    return f"its worker died ({signal.Signals(status).name})" if status else "its worker ended"
