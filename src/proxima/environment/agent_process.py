"""The worker program that plays episodes with a Python function. Each job runs in its own task or thread.

    python agent_process.py module:function

A line of JSON on stdin is a job: `{"id", "row", "base_url", "api_key", "model"}`. A line on stdout is its outcome:
`{"id", "reward"}` or `{"id", "error"}`. The function's own output goes to stderr. Imports only the standard library.
"""

import asyncio
import importlib
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

ASKED = ("row", "base_url", "api_key", "model")
THREADS = 256  # maximum of concurrent episodes if the function is not async


def main(reference: str) -> None:
    """Run jobs until stdin ends, then exit at once, even if jobs are still running."""
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)  # the function may print
    sys.stdout = os.fdopen(1, "w", closefd=False, encoding="utf-8", errors="backslashreplace", buffering=1)
    module, _, name = reference.partition(":")
    sys.path.insert(0, os.getcwd())
    function = getattr(importlib.import_module(module), name)
    loop = asyncio.new_event_loop()
    loop.set_default_executor(ThreadPoolExecutor(THREADS))

    async def work(job: dict[str, Any]) -> None:
        answer = {"id": job["id"], **await _played(function, job)}
        answers.write(json.dumps(answer) + "\n")

    def read() -> None:
        for line in sys.stdin:
            asyncio.run_coroutine_threadsafe(work(json.loads(line)), loop)
        os._exit(0)  # the run has ended, cleanly or not

    threading.Thread(target=read, daemon=True).start()
    loop.run_forever()


class JobRow(dict[str, Any]):
    """The row of an episode; a column that it lacks is a KeyError that lists those it has."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(f"{name}; the row has {', '.join(self)}")


async def _played(function: Callable[..., Any], job: dict[str, Any]) -> dict[str, Any]:
    job["row"] = JobRow(job["row"])
    arguments = {name: job[name] for name in inspect.signature(function).parameters if name in ASKED}
    try:
        if inspect.iscoroutinefunction(function):
            reward = await function(**arguments)
        else:
            reward = await asyncio.to_thread(function, **arguments)
        if isinstance(reward, Mapping):  # of each role
            return {"reward": {str(name): float(value) for name, value in reward.items()}}
        return {"reward": None if reward is None else float(reward)}
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        return {"error": text[:300]}


if __name__ == "__main__":
    main(sys.argv[1])
