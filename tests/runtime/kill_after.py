"""A tiny run in a process of its own, killed by a thread of it: at any instant, whatever it is doing."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.warm import WarmPopen

RUN = """
import json, os, signal, sys, threading
from pathlib import Path
from tests.runtime.tiny_run import Watcher, go
from proxima.process import start as starting
from tests.warm import forked_subprocess

starting.subprocess = forked_subprocess()

folder, tree, seconds, start = sys.argv[1:]

def on(event, *facts):
    if event == start and (event == "started" or facts[0]["step"] == 1):
        threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()

go(Path(folder), json.loads(tree), observer=Watcher(on))
"""


def kill_after(seconds: float, folder: Path, tree: dict[str, Any], *, start: str = "started") -> None:
    """`go`, killed so long after `started`, or after its first `step`; it may have ended before."""
    words = [str(folder), json.dumps(tree), str(seconds), start]
    where = Path(__file__).parents[2]
    with WarmPopen([sys.executable, "-c", RUN, *words], cwd=where, stderr=subprocess.PIPE) as killed:
        _, err = killed.communicate(timeout=300)
    assert killed.returncode in (0, -signal.SIGKILL), err
