"""The process of `proxima view`: its socket, its address and its key."""

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from proxima.data import UserError
from proxima.experiments.run_reader import find_runs
from proxima.reward.server.bounded_server import BoundedServer, open_socket
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.runtime.state.folder import RunFolder
from proxima.view.microscope.app import MicroscopeApp
from proxima.view.microscope.viewed_run import ViewedRun

BACKLOG = 64  # connections that wait


def open_runs(folders: Sequence[str | Path], *, recompute: bool = False) -> list[ViewedRun]:
    """Open runs, and those below a folder that is none; with `recompute`, columns not stored are computed from their
    weights.

    Raises:
        UserError: a folder leads to no run. Files missing in a run are reported on its page.
    """
    found = find_runs(folders)
    return [
        ViewedRun(i, RunFolder(run), recompute, name)
        for i, (run, name) in enumerate(zip(found, distinct(found), strict=True))
    ]


def distinct(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: that of its folder, with as many folders above it as tell it from the others. The
    runs of a sweep are `CELL/seed-1`."""
    parts = [folder.resolve().parts for folder in folders]

    def name(own: tuple[str, ...]) -> str:
        for depth in range(1, len(own)):
            end = own[-depth:]
            if sum(other[-depth:] == end for other in parts) == 1 and not (
                depth == 1 and re.fullmatch(r"seed-\d+", end[0])
            ):
                return "/".join(end)
        return "/".join(own[-2:])

    return [name(own) for own in parts]


def listen(host: str, port: int, otherwise: int | None = None) -> socket.socket:
    """Open a listening socket; port 0 takes a free port; `otherwise` is a fallback port.

    Raises:
        UserError: the port is taken, or the address is not one of this machine's.
    """
    try:
        listening = open_socket(host, port)
    except UserError:
        if otherwise is None:
            raise
        listening = open_socket(host, otherwise)
    listening.listen(BACKLOG)
    return listening


def address_of(listening: socket.socket, host: str, key: str) -> str:
    """Return the URL to open in a browser."""
    port, place = listening.getsockname()[1], listening.getsockname()[0]
    name = socket.gethostname() if place in ("0.0.0.0", "::") else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/{f'?key={key}' if key else ''}"


def make_server(app: MicroscopeApp, read_seconds: float = ScorerLimits.read_seconds) -> BoundedServer:
    """Make a server with a scorer's limits on connections."""
    return BoundedServer(app.asgi, read_seconds, ScorerLimits.connections)


def serve_pages(app: MicroscopeApp, listening: socket.socket) -> None:
    """Serve until a signal arrives."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: leave the other cores to training
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    with suppress(KeyboardInterrupt):
        # imports torch, which takes seconds
        threading.Thread(target=import_module, args=("proxima.view.microscope.explained_tokens",), daemon=True).start()
        asyncio.run(make_server(app).serve([listening]))
