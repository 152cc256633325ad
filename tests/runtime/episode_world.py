"""Runs of seconds with an environment, in processes that can be found and killed."""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from proxima.process.worker import FORK_SERVER
from tests.processes import is_running, with_word
from tests.runtime.tiny_run import go as go
from tests.runtime.tiny_run import recipe, traces

MARK = "PROXIMA_TEST_MARK"  # a variable that all processes of a test inherit
STOPS = list("aeiouAEIOU0123456789 ")  # single letters, so that a random model ends its turns


def episode_recipe(model: Path, **changes: Any) -> dict[str, Any]:
    """As `recipe`, in an environment of three turns, scored by it."""
    world = {"kind": "tests.runtime.echo_world:Echo"}
    own = {"task__environment": world, "eval__task__environment": world, "reward": [{"kind": "environment"}]}
    own |= {"sampling__stop": STOPS, "sampling__max_tokens": 12, "train__tokens_per_micro_batch": 1000}
    own |= {"episode__call_seconds": 300.0}
    return recipe(model, **(own | changes))


def marked(mark: str) -> list[int]:
    """The processes that inherited a mark, but for this one."""
    return [pid for pid in with_word("environ", f"{MARK}={mark}") if is_running(pid)]


def left_of(mark: str) -> list[bytes]:
    """The commands of those that still run, after they had minutes to end."""
    deadline = time.monotonic() + 300
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]


def kill_workers(mark: str, draws: random.Random) -> int:
    """Kill some of the processes in which environments live, or that start these; how many."""
    started = with_word("cmdline", FORK_SERVER)
    workers = [pid for pid in marked(mark) if pid in started]
    chosen = draws.sample(workers, draws.randint(1, len(workers))) if workers else []
    for pid in chosen:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return len(chosen)


def whole(folder: Path) -> dict[str, Any]:
    """The traces of a run, without how often its episodes were begun."""
    run_traces = traces(folder)
    for rows in (*run_traces["rollouts"].values(), *run_traces["evals"].values()):
        for row in rows:
            row["episode"] = json.loads(row["episode"]) | {"attempts": 1}
    for record in run_traces["metrics"]:
        record.pop("episode/retried", None)
    return run_traces
