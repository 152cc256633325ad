"""The program that `openenv` starts in the interpreter that has the package openenv. It holds sessions, by number.

A line of JSON on stdin is a call, `{"number", "method", "arguments"}`; a line on stdout is its outcome, `{"result"}`
or `{"error"}`. The package's own output goes to stderr. Imports only the standard library and the package: proxima is
not installed there.
"""

import contextlib
import json
import os
import sys
from typing import Any


class OpenEnvSession:
    """A session with an OpenEnv server."""

    def __init__(self, url: str) -> None:
        from openenv.core import GenericEnvClient  # type: ignore[import-not-found, unused-ignore]

        self.client = GenericEnvClient(base_url=url).sync()
        self.client.connect()

    def reset(self, **arguments: Any) -> dict[str, Any]:
        return self._told(self.client.reset(**arguments))

    def step(self, action: dict[str, Any]) -> dict[str, Any]:
        return self._told(self.client.step(action))

    def close(self) -> None:
        self.client.close()

    def _told(self, result: Any) -> dict[str, Any]:
        return {"observation": result.observation, "reward": result.reward, "done": bool(result.done)}


def main() -> None:
    """Answer calls until stdin ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path[0] = os.getcwd()  # not this folder, whose files have the names of packages
    sessions: dict[int, OpenEnvSession] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        number, method, arguments = asked["number"], asked["method"], asked["arguments"]
        result: Any = {}
        try:
            if method == "make":
                sessions[number] = OpenEnvSession(**arguments)
            elif method == "drop":
                with contextlib.suppress(Exception):
                    sessions.pop(number).close()
            else:
                result = getattr(sessions[number], method)(**arguments)
            answer = json.dumps({"result": result})
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            answer = json.dumps({"error": reason[:300]})
        answers.write(answer + "\n")


if __name__ == "__main__":
    main()
