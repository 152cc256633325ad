"""Worker processes that can be killed, used by rewards and environments: the run's side.

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
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxima.process.kill import wait_or_kill
from proxima.process.lines import LineChannel
from proxima.process.start import ONE_THREAD, start_module

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
        environment = {**os.environ, **ONE_THREAD, "PYTHONDONTWRITEBYTECODE": "1"}
        self._process, control = start_module(FORK_SERVER, env=environment)
        self._control = LineChannel(control)
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
        self._control.connection.close()  # the fork server kills its workers, then exits
        wait_or_kill(self._process, 5.0)

    def _call(self, request: Mapping[str, Any], fd: int | None = None) -> dict[str, Any]:
        """Send a request, and `fd` if given, and return the reply; RuntimeError if the server is gone."""
        with self._lock:
            try:
                self._control.send(request, () if fd is None else (fd,))
                reply: dict[str, Any] = self._control.receive(time.monotonic() + START_SECONDS)
            except (EOFError, OSError, ValueError) as error:
                self._gone = True  # its parent may still be killing the processes it left behind
                late = f"did not answer within {START_SECONDS:g} s" if isinstance(error, TimeoutError) else "is gone"
                raise RuntimeError(f"the process that starts {self.who} workers {late}") from error
        return reply


class Worker:
    """One worker process and the socket to it."""

    def __init__(self, fork_server: ForkServer, pid: int, channel: socket.socket) -> None:
        self._fork_server, self._pid, self._channel = fork_server, pid, LineChannel(channel, REPLY_BYTES)
        self.jobs_done, self.alive = 0, True

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
            reply = self._channel.receive(deadline)
            if reply["id"] != job_id:
                raise ValueError("a reply to something else")
        except TimeoutError:
            self.kill()
            return JobResult(error=f"timed out after {seconds:g} s")
        except (EOFError, OSError):
            return JobResult(error=_death(self.kill(), cpu_seconds))
        except (LookupError, RecursionError, TypeError, ValueError):
            self.kill()
            who = self._fork_server.who
            why = f"something wrote into its worker's socket; a {who} must leave open files and processes alone"
            return JobResult(error=why)
        if reply.get("last"):
            self.kill()
        return JobResult(value=reply.get("result"), error=reply.get("error"))

    def kill(self) -> int:
        """Kill the worker if it is still running. Returns the signal that ended it, 0 if it exited by itself."""
        if not self.alive:
            return 0
        self.alive = False
        self._channel.connection.close()
        return self._fork_server.kill(self._pid)


def _death(status: int, cpu_seconds: float | None) -> str:
    if status == signal.SIGPROF:
        return f"timed out after {cpu_seconds:g} s of CPU time"
    return f"its worker died ({signal.Signals(status).name})" if status else "its worker ended"
