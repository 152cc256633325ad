"""The process of `proxima view`: its socket, its address and its key. As a module, it is a `ViewerProcess`."""

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from proxima.data import UserError
from proxima.experiments.run_reader import find_runs
from proxima.reward.server.scorer_limits import ScorerLimits
from proxima.runtime.state.folder import RunFolder
from proxima.system.bounded_server import BoundedServer
from proxima.system.listening import open_socket
from proxima.view.microscope import PORT
from proxima.view.microscope.app import MicroscopeApp
from proxima.view.microscope.viewed_run import ViewedRun

NICE = 10  # of the viewer of a run in progress: training has priority
BACKLOG = 64  # connections that wait


def open_runs(folders: Sequence[str | Path], *, recompute: bool = False) -> list[ViewedRun]:
    """Open runs, and those below a folder that is none; with `recompute`, columns not stored are computed from their
    weights.

    Raises:
        UserError: a folder leads to no run. Files missing in a run are reported on its page.
    """
    runs = find_runs(folders)
    return [
        ViewedRun(i, RunFolder(run), recompute, name)
        for i, (run, name) in enumerate(zip(runs, distinct(runs), strict=True))
    ]


def distinct(folders: Sequence[Path]) -> list[str]:
    """Return a name for each run: that of its folder, with as many folders above it as tell it from the others. The
    runs of a sweep are `CELL/seed-1`."""
    parts = [folder.resolve().parts for folder in folders]

    def name(path: tuple[str, ...]) -> str:
        for depth in range(1, len(path)):
            end = path[-depth:]
            if sum(other[-depth:] == end for other in parts) == 1 and not (
                depth == 1 and re.fullmatch(r"seed-\d+", end[0])
            ):
                return "/".join(end)
        return "/".join(path[-2:])

    return [name(path) for path in parts]


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
    place, port = listening.getsockname()[:2]
    name = host
    if place in ("0.0.0.0", "::"):
        name = socket.gethostname()
    if ":" in name:
        name = f"[{name}]"
    address = f"http://{name}:{port}/"
    return f"{address}?key={key}" if key else address


def make_server(app: MicroscopeApp, read_seconds: float = ScorerLimits.read_seconds) -> BoundedServer:
    """Make a server with a scorer's limits on connections."""
    return BoundedServer(app.asgi, read_seconds, ScorerLimits.connections)


def serve_pages(app: MicroscopeApp, listening: socket.socket) -> None:
    """Serve until a signal arrives."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch computes anything: leave the other cores to training
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C
    with suppress(KeyboardInterrupt):
        asyncio.run(make_server(app).serve([listening]))


def main(channel: socket.socket, folder: str) -> None:
    """Serve a run for as long as this process lives; the address goes into the channel."""
    os.nice(NICE)
    app = MicroscopeApp(open_runs([folder]))
    with listen("127.0.0.1", PORT, otherwise=0) as listening:
        channel.sendall(f"{address_of(listening, '127.0.0.1', '')}\n".encode())
        serve_pages(app, listening)


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
