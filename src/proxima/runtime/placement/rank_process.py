"""The process of a rank: calls the function that its actor names. Started by `engine/process_start.py`, so that it ends
with the actor, however the actor ends.

The channel carries one line of JSON: `{"function": "module:name", "arguments": {…}}`. The function's result is the exit
code.
"""

import importlib
import json
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from proxima.data.errors import UserError

BUG, REFUSED, INTERRUPTED = 70, 2, 130  # exit codes, as of the command line


def exit_code_of(reference: str, arguments: Mapping[str, Any]) -> int:
    """Call `module:name`, and return the exit code."""
    module, _, name = reference.partition(":")
    try:
        return int(getattr(importlib.import_module(module), name)(**arguments) or 0)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return BUG


def main(descriptor: int) -> int:
    # the raylet blocks SIGINT for all its descendants
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    with socket.socket(fileno=descriptor).makefile("rb") as channel:
        call = json.loads(channel.readline())
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True, errors="replace")  # type: ignore[union-attr]
        return exit_code_of(call["function"], call["arguments"])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
