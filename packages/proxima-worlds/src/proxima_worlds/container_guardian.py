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
MUTE = 30  # looks in a row after which an engine that lists nothing is taken for stopped
SECONDS = 120.0  # that an engine may take to remove containers
LABEL = "proxima.run"


def names(engine: str, run: str = "") -> list[str] | None:
    """The names of the containers of a run, or of all runs; None: the engine did not say."""
    label = f"{LABEL}={run}" if run else LABEL
    return _listed(engine, "ps", "-a", "--filter", f"label={label}", "--format", "{{.Names}}")


def volumes(engine: str, run: str = "proxima") -> list[str] | None:
    """The names of the volumes of a run, or of all runs; None: the engine did not say."""
    listed = _listed(engine, "volume", "ls", "--filter", f"name={run}", "--format", "{{.Name}}")
    if listed is None:
        return None
    return [name for name in listed if name.startswith(f"{run}-")]


def _listed(*asked: str) -> list[str] | None:
    """What a command of the engine lists; None if it fails, as podman's does while another command removes a container
    that it has begun to look up."""
    try:
        ran = subprocess.run(asked, capture_output=True, encoding="utf-8", errors="replace", timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if ran.returncode:
        return None
    return ran.stdout.split()


def remove(engine: str, containers: Sequence[str], volumes: Sequence[str] = ()) -> None:
    """Kill and remove containers, then volumes; what is gone is no error."""
    for words, named in (("rm", "-f"), containers), (("volume", "rm"), volumes):
        if named:
            with suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([engine, *words, *named], capture_output=True, timeout=SECONDS)


def clean(engine: str, run: str, folder: str) -> None:
    """Remove all that a run has left, until no command of it is at work that could create more."""
    deadline = time.monotonic() + SECONDS
    quiet = mute = 0  # looks in a row
    while quiet < QUIET and mute < MUTE and time.monotonic() < deadline:
        left = names(engine, run)
        kept = volumes(engine, run)
        remove(engine, left or (), kept or ())
        nothing = left == [] and kept == [] and not _commands(run)
        unanswered = left is None or kept is None
        quiet = quiet + 1 if nothing else 0
        mute = mute + 1 if unanswered else 0
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
