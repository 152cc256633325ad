"""`proxima.environment.host_process`, for a server that has imported what its workers need: a warm-up of any other name
than its own imports that module."""

import importlib
from collections.abc import Callable

from proxima.environment.interface import HOST_PROCESS
from proxima.process.fork_server import load_jobs


class _WarmUps(dict[str, Callable[[], object]]):
    def __missing__(self, module: str) -> Callable[[], object]:
        return lambda: importlib.import_module(module)


_HOST = load_jobs(HOST_PROCESS)
JOBS, WARM_UPS = _HOST.JOBS, _WarmUps(_HOST.WARM_UPS)
