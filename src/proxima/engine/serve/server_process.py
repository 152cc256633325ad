"""One server in separate processes: start, readiness and health checks, stop. Restarts are handled in `servers.py`."""

import signal
from pathlib import Path

import httpx

from proxima.engine.serve.launch import Launch
from proxima.engine.serve.server_log import last_error
from proxima.process.kill import describe_exit
from proxima.process.start import start_module

PATIENCE = 10.0  # seconds from SIGTERM to SIGKILL
TAIL = 200_000  # bytes at the end of the log that are read
ASK_SECONDS = 5.0


class ServerProcess:
    """A server that is started immediately, and stops when this process ends, however it ends.

    Args:
        launch: command and address.
        key: key that clients must send; it is passed in an environment variable, and never written.
        log: file to which its output is appended, below a line with the command.
    """

    def __init__(self, launch: Launch, key: str, log: Path) -> None:
        self.launch, self.log = launch, log
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(base_url=launch.url, headers=headers, trust_env=False, timeout=ASK_SECONDS)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            stream.write(f"$ {launch.by_hand}\n".encode())
            stream.flush()
            self._begin = stream.tell()
            command, environment = (f"{PATIENCE:g}", *launch.command), launch.environment(key)
            self._child = start_module(
                "proxima.process.guardian", *command, flag="-I", stdout=stream, stderr=stream, env=environment
            )

    @property
    def code(self) -> int | None:
        """Exit code of the server, 128 + N or -N after signal N; None while it runs."""
        return self._child.process.poll()

    def answers(self) -> bool:
        """Return True if the server is ready: it is healthy, and serves its model to clients with the key."""
        try:
            ready = self._status_is_good("/health") and self._status_is_good("/v1/models")
        except httpx.HTTPError:
            return False
        return ready and self.code is None

    def is_unhealthy(self) -> bool | None:
        """Return True if a server that has answered before can't recover although its process runs: it reports so, or
        no longer listens. None: it does not answer, for example because it is busy.
        """
        try:
            return not self._status_is_good("/health")
        except httpx.ConnectError:
            return True
        except httpx.HTTPError:
            return None

    def _status_is_good(self, path: str) -> bool:
        """Send a GET and return whether its status is a success; the body is not read."""
        with self._http.stream("GET", path) as response:
            return response.is_success

    def output(self) -> str:
        """The last part of its output since its start."""
        with self.log.open("rb") as stream:
            end = stream.seek(0, 2)
            stream.seek(max(self._begin, end - TAIL))
            return self.launch.masked(stream.read().decode(errors="replace"))

    def describe_exit(self) -> str:
        """Describe how it ended, with the line of its log that explains why."""
        code = self.code or 0
        code = 128 - code if code - 128 in list(signal.Signals) else code
        return describe_exit(code, last_error(self.output()))

    def ask_to_stop(self) -> None:
        """Start stopping all its processes; `stop` waits until they have ended."""
        self._child.channel.close()

    def stop(self) -> None:
        """Stop all its processes and wait until they have ended. May be called twice."""
        self._child.end(3 * PATIENCE)  # if it is killed, the server gets a SIGTERM from the kernel
        self._http.close()
