"""The program that `openenv` starts in the interpreter that has the package openenv. It holds sessions, by number.

Each request is a call of a method of a session, `{"number", "arguments"}`; see `Program.call`. The package's own output
goes to stderr. Imports only the standard library and the package: proxima is not installed there.
"""

import contextlib
import json
import os
import sys
from typing import Any


def open_session(url: str) -> Any:
    """A client of an OpenEnv server, with a session."""
    from openenv.core import GenericEnvClient

    client = GenericEnvClient(base_url=url).sync()
    client.connect()
    return client


def main() -> None:
    """Answer calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8", errors="backslashreplace", buffering=1)
    sys.path[0] = os.getcwd()  # not this folder, whose files have the names of packages
    sessions: dict[int, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        method = request["method"]
        number = request["params"]["number"]
        arguments = request["params"]["arguments"]
        result: Any = {}
        try:
            if method == "make":
                sessions[number] = open_session(**arguments)
            elif method == "drop":
                with contextlib.suppress(Exception):
                    sessions.pop(number).close()
            else:
                step = getattr(sessions[number], method)(**arguments)
                result = {"observation": step.observation, "reward": step.reward, "done": bool(step.done)}
            answer = json.dumps({"id": request["id"], "result": result})
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            answer = json.dumps({"id": request["id"], "error": {"message": reason[:300]}})
        answers.write(answer + "\n")


if __name__ == "__main__":
    main()
