"""Fork servers that the tests of a process share: a start takes seconds of imports."""

import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from proxima.environment.interface import HOST_PROCESS
from proxima.process import worker
from proxima.process.worker import ForkServer, Worker
from proxima.reward import Math

DESCRIBES_TOOLS = "transformers.utils.chat_template_utils"
_SERVERS: dict[str, ForkServer] = {}  # they end with this process


class LentServer(ForkServer):
    """A server as one pool or set of hosts has it: `close` kills the workers that it forked for them, and no more."""

    def __init__(self, server: ForkServer, limits: Mapping[str, Any]) -> None:
        self.who, self._server, self._limits = server.who, server, limits
        self._workers: set[int] = set()
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        return self._server.alive

    def fork(self, **limits: Any) -> Worker:
        return super().fork(**{**self._limits, **limits})

    def close(self) -> None:
        for pid in list(self._workers):
            self.kill(pid)

    def _call(self, request: Mapping[str, Any], fd: int | None = None) -> dict[str, Any]:
        with self._lock:
            if request["do"] == "kill":
                if request["pid"] not in self._workers:  # another thread has killed it
                    return {"status": 0}
                self._workers.discard(request["pid"])
            reply = self._server._call(request, fd)
            if request["do"] == "fork":
                self._workers.add(reply["pid"])
            return reply


@contextmanager
def lent_servers(imports: Sequence[str] = ()) -> Iterator[None]:
    """Share fork servers. A test that changes the folder, the path or the
    variables of this process has servers of its own, but for graders of `math`, which are the same everywhere.

    The shared ones of environments import what describes tools, and `imports`, before they fork."""
    at_first, own = surroundings(), dict[str, ForkServer]()

    def start(jobs: str, who: str, options: Mapping[str, Any]) -> ForkServer:
        around = None if options["warm_ups"] == [Math.warm_up] else surroundings()
        if jobs == HOST_PROCESS and around == at_first:
            options = {**options, "warm_ups": [*options["warm_ups"], DESCRIBES_TOOLS, *imports]}
        # processes of a marked test inherit its mark, and none may outlive it
        shared = around in (None, at_first) and not os.environ.get("PROXIMA_TEST_MARK")
        servers, key = _SERVERS if shared else own, repr((jobs, options["warm_ups"], around))
        if key not in servers or not servers[key].alive:
            servers[key] = ForkServer(jobs, who, options)
        return LentServer(servers[key], {name: options[name] for name in ("restricted", "memory_mb")})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, "ForkServer", start)
        yield
        assert worker.ForkServer is start, "a patch that is undone later would put this `start` back, for good"
    for server in own.values():
        server.close()


def surroundings() -> Any:
    """What a server takes from this process."""
    variables = sorted((key, value) for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST")
    return os.getcwd(), list(sys.path), variables
