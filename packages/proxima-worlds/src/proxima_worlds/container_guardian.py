"""Removes the containers and volumes of a run when the run has ended, however it ends.

Its arguments are ENGINE RUN FOLDER.

In a process of its own, because the run may be killed without a chance to clean up. Containers end by themselves when
the run does (`relay.c`), and their engine removes them; this process removes those that were only created, those of an
engine that failed, volumes, and FOLDER. Standard library only.
"""

import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

BEAT = 0.1  # seconds between looks
QUIET = 3  # looks in a row that must find nothing
SECONDS = 120.0  # that an engine may take to remove containers
LABEL = "proxima.run"


def names(engine: str, run: str = "") -> list[str]:
    """The names of the containers of a run, or of all runs."""
    label = f"{LABEL}={run}" if run else LABEL
    asked = [engine, "ps", "-a", "--filter", f"label={label}", "--format", "{{.Names}}"]
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            asked, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS
        ).stdout.split()
    return []


def volumes(engine: str, run: str = "proxima") -> list[str]:
    """The names of the volumes of a run, or of all runs."""
    asked = [engine, "volume", "ls", "--filter", f"name={run}", "--format", "{{.Name}}"]
    with suppress(OSError, subprocess.TimeoutExpired):
        ran = subprocess.run(asked, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS)
        return [name for name in ran.stdout.split() if name.startswith(f"{run}-")]
    return []


def remove(engine: str, containers: Sequence[str], volumes: Sequence[str] = ()) -> None:
    """Kill and remove containers, then volumes; what is gone is no error."""
    for words, named in (("rm", "-f"), containers), (("volume", "rm"), volumes):
        if named:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([engine, *words, *named], capture_output=True, timeout=SECONDS)


def clean(engine: str, run: str, folder: str) -> None:
    """Remove all that a run has left, until no command of it is at work that could create more."""
    deadline, quiet = time.monotonic() + SECONDS, 0
    while quiet < QUIET and time.monotonic() < deadline:
        left = names(engine, run)
        kept = volumes(engine, run)
        remove(engine, left, kept)
        quiet = 0 if left or kept or _commands(run) else quiet + 1
        time.sleep(BEAT)
    shutil.rmtree(folder, ignore_errors=True)


def _commands(run: str) -> bool:
    """True while a command that names the run is at work."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if run.encode() in (place / "cmdline").read_bytes() and int(place.name) != os.getpid():
                return True
    return False


def outlive(channel: socket.socket, engine: str, run: str, folder: str) -> None:
    """Wait for the run to end, then clean."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    parent = os.getppid()
    while os.getppid() == parent and not select.select([channel], [], [], BEAT)[0]:
        pass
    clean(engine, run, folder)


if __name__ == "__main__":
    outlive(socket.socket(fileno=int(sys.argv[1])), *sys.argv[2:])
