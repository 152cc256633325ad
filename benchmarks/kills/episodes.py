"""`python -m benchmarks.kills.episodes`: kill the trainer, the engine or the environments' workers of runs that play
episodes, resume them, and look at what is left: of synchronous runs the bits of one that nobody killed, of asynchronous
ones each prompt once, and no process."""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.kills.run import AGAIN, Killed

STEPS = 6
REFUSED = ("can't be loaded: ", "can't begin an episode: ")  # its workers were killed again and again while it started


def synchronous(model: Path) -> dict[str, Any]:
    """Three turns an episode; the environment's failures are begun again, so that its workers may be killed."""
    from tests.runtime.episode_world import episode_recipe

    return episode_recipe(model, train__steps=STEPS, episode__retries=50)


def asynchronous(model: Path) -> dict[str, Any]:
    """The same, with an engine of its own that generates beside the training."""
    engine = {"kind": "local_process", "dtype": "float32", "slots": 8, "threads": 1, "restarts": 20}
    overlap = {"threads": 1, "max_lag": 2, "max_concurrent_rollouts": 3}
    return synchronous(model) | {"engine": engine, "runtime": overlap}


RECIPES = {"sync": synchronous, "async": asynchronous}


def campaign(
    root: Path, kills: int, draws: random.Random, kinds: Sequence[str] = tuple(RECIPES), minutes: float = 600.0
) -> dict[str, Any]:
    """`kills` of them in runs of each kind; of each, no run begins after `minutes`."""
    from proxima.engine import supervisor
    from tests.runtime.episode_world import MARK
    from tests.warm import address, forked_subprocess

    address()  # of the server that forks the engines, which outlives the campaign's runs
    supervisor.subprocess = forked_subprocess()  # type: ignore[misc]
    os.environ[MARK] = mark = uuid.uuid4().hex
    killed, wrong, finished = Counter[str](), list[str](), 0
    for name in kinds:
        runs, done = Killed(root / name, RECIPES[name]), 0
        whole, folder = root / name / "whole", root / name / "run"
        runs.finish(whole)
        shutil.rmtree(whole)
        began = time.monotonic()
        runs.finish(whole)  # the first waited until the server had imported torch
        seconds = time.monotonic() - began
        while done < kills and time.monotonic() - began < 60 * minutes:
            shutil.rmtree(folder, ignore_errors=True)
            try:
                again = True
                while again:
                    hit = kill(runs, folder, mark, seconds, draws)
                    killed.update(f"{name} {what}" for what in hit)
                    done += len(hit) - ("start refused" in hit)
                    again = "trainer" in hit and draws.random() < AGAIN
                runs.finish(folder)
                check(folder, whole if name == "sync" else None)
                finished += 1
            except (RuntimeError, AssertionError, OSError, ValueError) as error:
                wrong.append(f"{name} {done}: {str(error)[-300:]}")
                done += 1
            if left := left_of(mark):
                wrong.append(f"{name} {done}: processes {left} are left")
            print(f"  {dict(killed)}, wrong: {wrong}", file=sys.stderr, flush=True)
    return {"kills": dict(killed), "runs_as_expected": finished, "wrong": wrong}


def kill(runs: Killed, folder: Path, mark: str, seconds: float, draws: random.Random) -> list[str]:
    """Start or resume the run and kill some of its processes again and again, until it ends or its trainer was killed.

    Args:
        seconds: that a run takes; one is killed about three times.

    Returns: what was killed: `trainer`, `engine`, `workers`; and `start refused` where the run said, before its first
    step, that it can't begin.
    """
    from tests.runtime.episode_world import kill_workers

    pid, hit = runs.start(folder), list[str]()
    while "trainer" not in hit:
        time.sleep(2 / 3 * seconds * draws.random())
        ended, status = os.waitpid(pid, os.WNOHANG)
        if status and not any(words in runs.errors.read_text() for words in REFUSED):
            raise RuntimeError(f"{hit} killed: ended with status {status}: {runs.errors.read_text()[-800:]}")
        if ended:
            return [*hit, *["start refused"] * bool(status)]
        what = draws.choice(["trainer", "workers", "engine"])
        if what == "engine":
            for engine in (engines := commands(mark, "proxima.engine")):
                with suppress(OSError):
                    os.kill(engine, signal.SIGKILL)
            hit += [what] * bool(engines)
        elif what == "workers":
            hit += [what] * bool(kill_workers(mark, draws))
        else:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            hit.append(what)
    return hit


def commands(mark: str, part: str) -> list[int]:
    """The processes of a campaign that have this in their command."""
    from tests.runtime.episode_world import marked

    found = []
    for pid in marked(mark):
        with suppress(OSError):
            found += [pid] if part.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


def check(folder: Path, unbroken: Path | None) -> None:
    """AssertionError if a prompt is lost or doubled, or a synchronous run is not the unbroken one."""
    from tests.runtime.episode_world import whole
    from tests.runtime.test_async_run import assert_whole
    from tests.runtime.tiny_run import assert_same

    records = assert_whole(folder, steps=STEPS)
    assert not any(record["episode/failed"] for record in records), "an episode failed"
    if unbroken is not None:
        assert_same(whole(folder), whole(unbroken))


def left_of(mark: str) -> list[int]:
    """The processes that a campaign left, after some seconds."""
    from tests.runtime.episode_world import marked

    deadline = time.monotonic() + 20
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def main() -> None:
    parser = harness.parser(__doc__, repeats=1)
    parser.add_argument("--kills", type=int, default=50, help="of runs of each kind (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", default=[*RECIPES], choices=RECIPES, help="of runs (default: both)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no run after (default: %(default)s)")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        found = campaign(Path(place), options.kills, random.Random(options.seed), options.kinds, options.minutes)
    print(harness.table(["killed", "times"], [[name, str(count)] for name, count in sorted(found["kills"].items())]))
    for line in [f"{len(found['wrong'])} wrong", *found["wrong"]]:
        print(line, file=sys.stderr)
    harness.finish(found | {"seed": options.seed}, options.json_out)


if __name__ == "__main__":
    harness.command(main)
