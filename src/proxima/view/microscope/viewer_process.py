"""The microscope of a run in progress or a notebook: a process that ends when its parent ends, for any reason."""

import threading
from pathlib import Path
from typing import TextIO

from proxima.data import UserError
from proxima.process.children import start_module
from proxima.runtime.watch.observer import Observer, Record, RunInfo
from proxima.system.machine import SERVER_REMEDY, missing_for_server

SERVER = "proxima.view.microscope.server"  # not imported: a run needs no web server in its own process


def require_server(what: str) -> None:
    """Raise UserError if a package that the server needs is not installed."""
    missing = missing_for_server()
    if missing:
        raise UserError(f"{what} needs {missing}", remedy=SERVER_REMEDY)


class ViewerProcess:
    """Serves the page of a run folder until `end`, or until this process ends.

    Args:
        folder: folder of the run, which may not have started yet.
    """

    def __init__(self, folder: Path) -> None:
        require_server("view")
        self.child = start_module(SERVER, folder)

    def address(self) -> str:
        """Wait until the server listens and return the URL to open in a browser; empty if it could not start."""
        with self.child.channel.makefile() as said:
            return said.readline().strip()

    def end(self) -> None:
        self.child.end()


class ViewerObserver(Observer):
    """`view=true` in a recipe: starts with the run, prints its address, and ends with the run.

    Args:
        stream: the stream to which the address is printed; None: don't print it.
    """

    def __init__(self, stream: TextIO | None) -> None:
        require_server("view=true")
        self.stream = stream
        self.viewer: ViewerProcess | None = None

    def started(self, info: RunInfo) -> None:
        self.viewer = ViewerProcess(info.folder)
        threading.Thread(target=self._announce, args=(self.viewer,), daemon=True).start()

    def _announce(self, viewer: ViewerProcess) -> None:
        address = viewer.address()
        if self.stream is not None and address:
            print(f"view  {address}  until the run ends", file=self.stream, flush=True)

    def finished(self, summary: Record) -> None:
        if self.viewer is not None:
            self.viewer.end()
