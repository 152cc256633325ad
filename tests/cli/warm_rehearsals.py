"""Rehearsals in a process that need not import torch first, and that no other rehearsal uses."""

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

from tests.warm import WarmPopen

PROGRAM = """
import pickle, sys
function, arguments = pickle.load(sys.stdin.buffer)
pickle.dump(function(*arguments), sys.stdout.buffer)
"""


class WarmExecutor:
    """What a rehearsal asks of `ProcessPoolExecutor`."""

    def __init__(self, *_: Any, **__: Any) -> None:
        """Nothing is started before there is work."""

    def __enter__(self) -> "WarmExecutor":
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left."""

    def submit(self, *call: Any) -> Any:
        with WarmPopen([sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            out, _ = process.communicate(pickle.dumps((call[0], call[1:])))
        return SimpleNamespace(result=lambda: pickle.loads(out))
