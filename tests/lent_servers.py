"""Fork servers that the tests of a process share: a start takes seconds of imports."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from proxima.environment import hosts
from proxima.environment.interface import HOST_PROCESS
from proxima.process.children import Child
from proxima.process.worker import ForkServer, Worker
from proxima.reward.math.symbolic import Math
from proxima.reward.workers import pool

USERS: Sequence[Any] = (hosts, pool)
DESCRIBES_TOOLS = "transformers.utils.chat_template_utils"
_SERVERS: dict[str, ForkServer] = {}  # they end with this process


class LentServer(ForkServer):
    """A server as one pool or set of hosts has it: `close` kills the workers that it forked for them, and no more."""

    def __init__(self, server: ForkServer, options: Mapping[str, Any], slow: Mapping[str, str]) -> None:
        super().__init__(server.jobs, server.who, options, slow)
        self._server = server
        self._workers: dict[int, Child] = {}

    def kill(self, child: Child, pid: int) -> int:
        with self._lock:
            mine = self._workers.pop(pid, None) is not None  # else another thread has killed it
        return self._server.kill(child, pid) if mine else 0

    def close(self) -> None:
        self.closed = True
        for pid, child in list(self._workers.items()):
            self.kill(child, pid)

    def fork(self, *setup: Any, **limits: Any) -> Worker:
        if self.closed:
            return super().fork()
        own = {name: self.options[name] for name in ("restricted", "memory_mb")}
        worker = self._server.fork(*setup, **own | limits)
        self._workers[worker.pid] = worker._child
        worker._server = self
        return worker


@contextmanager
def lent_servers(imports: Sequence[str] = ()) -> Iterator[None]:
    """Share fork servers. A test that changes the folder, the path or the
    variables of this process has servers of its own, but for graders of `math`, which are the same everywhere.

    The shared ones of environments import what describes tools, and `imports`, before they fork."""
    at_first, own = surroundings(), dict[str, ForkServer]()

    def start(
        jobs: str, who: str, options: Mapping[str, Any], slow: Mapping[str, str], sandbox: Any = None
    ) -> ForkServer:
        if sandbox is not None:
            return ForkServer(jobs, who, options, slow, sandbox)
        around = None if options["warm_ups"] == [Math.warm_up] else surroundings()
        if jobs == HOST_PROCESS and around == at_first:
            options = {**options, "warm_ups": [*options["warm_ups"], DESCRIBES_TOOLS, *imports]}
        # processes of a marked test inherit its mark, and none may outlive it
        shared = around in (None, at_first) and not os.environ.get("PROXIMA_TEST_MARK")
        servers, key = _SERVERS if shared else own, repr((jobs, options["warm_ups"], around))
        return LentServer(servers.setdefault(key, ForkServer(jobs, who, options)), options, slow)

    with pytest.MonkeyPatch.context() as patch:
        for user in USERS:
            patch.setattr(user, "ForkServer", start)
        yield
        for user in USERS:
            assert user.ForkServer is start, "a patch that is undone later would put this `start` back, for good"
    for server in own.values():
        server.close()


def surroundings() -> Any:
    """What a server takes from this process."""
    variables = sorted((key, value) for key, value in os.environ.items() if key != "PYTEST_CURRENT_TEST")
    return os.getcwd(), list(sys.path), variables
