"""What runs inside a side's process. Standard library only: a peer's environment has no proxima.

The harness and a side exchange one JSON object a line: a request on stdin, its answer on what was stdout.
Whatever the side prints goes to its log.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


class Channel:
    """Takes stdout for itself, so that no progress bar of a library ends up among the answers."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def send(self, **answer: Any) -> None:
        self._answers.write(json.dumps(answer) + "\n")

    def wait(self) -> bool:
        """Sleep until the next request; False when the harness is done."""
        return bool(sys.stdin.readline())


def serve(once: Callable[[], dict[str, Any]], channel: Channel, **ready: Any) -> None:
    """Say `ready`, then answer each request with what `once` measured."""
    channel.send(**ready)
    while channel.wait():
        channel.send(**once())


def device() -> str:
    """Where both sides compute: the GPU, if there is one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def clock() -> float:
    """Seconds, once the GPU has done what it was asked for."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def argument() -> dict[str, Any]:
    """The settings that the harness gave on the command line."""
    return json.loads(sys.argv[1])
