"""`python -m benchmarks.kills.episodes`: kill the trainer, the engine or the environment workers of episode runs,
resume them, and check the result: synchronous runs equal an unbroken one bit for bit, asynchronous ones consume each
prompt once, and no process is left.

Each finished run is one line of a file, so that an interrupted campaign continues where it stopped."""

import json
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.kills.run import AGAIN, Killed

STEPS = 6
REFUSED = ("can't be loaded: ", "can't begin an episode: ")  # its workers were killed again and again while it started


def synchronous(model: Path) -> dict[str, Any]:
    """Return a recipe with three turns an episode and retries of failed environments, so that workers may be killed."""
    from tests.runtime.episode_world import episode_recipe

    return episode_recipe(model, train__steps=STEPS, episode__retries=50)


def asynchronous(model: Path) -> dict[str, Any]:
    """Return the same recipe with a separate engine that generates during training."""
    engine = {"kind": "local_process", "dtype": "float32", "slots": 8, "threads": 1, "restarts": 20}
    overlap = {"threads": 1, "max_lag": 2, "max_concurrent_rollouts": 3}
    return synchronous(model) | {"engine": engine, "runtime": overlap}


RECIPES = {"sync": synchronous, "async": asynchronous}
VICTIMS = {"sync": ("trainer", "workers"), "async": ("trainer", "workers", "engine")}


def campaign(
    root: Path, file: Path, kills: int, seed: int = 1, kinds: Sequence[str] = tuple(RECIPES)
) -> dict[str, Any]:
    """Play runs of each kind until `kills` of its processes have been killed, those of earlier sessions included.

    Args:
        root: a folder for the runs.
        file: gets a line of JSON for each run.
    """
    from proxima.process import children as starting
    from tests.runtime.episode_world import MARK
    from tests.warm import address, forked_subprocess

    address()  # of the server that forks the engines, which outlives the campaign's runs
    starting.subprocess = forked_subprocess()  # type: ignore[misc]
    os.environ[MARK] = mark = uuid.uuid4().hex
    stage, commit = noted_stage(), harness.commit()
    for name in kinds:
        runs, whole = Killed(root / name, RECIPES[name]), root / name / "whole"
        runs.finish(whole)
        shutil.rmtree(whole)
        began = time.monotonic()
        runs.finish(whole)  # the first waited until the server had imported torch
        killer = Killer(runs, VICTIMS[name], mark, time.monotonic() - began, stage)
        while sum(kills_of(done := lines(file, name)).values()) < kills:
            draws = random.Random(f"{seed} {name} {len(done)}")
            run = killer.play(root / name / "run", whole if name == "sync" else None, draws)
            with file.open("a", encoding="utf-8") as kept:
                kept.write(json.dumps({"kind": name, "commit": commit, **run}) + "\n")
            print(f"  {name} {len(done) + 1}: {run}", file=sys.stderr, flush=True)
    return summary([line for name in kinds for line in lines(file, name)])


def noted_stage() -> mmap.mmap:
    """Return shared memory in which the runs forked from now on record the stage of their loop."""
    from proxima.runtime.watch.activity import Activity

    noted, inner = mmap.mmap(-1, 16), Activity.stage

    @contextmanager
    def stage(self: Activity, name: str, **facts: Any) -> Iterator[None]:
        try:
            with inner(self, name, **facts):
                noted[:] = name.encode().ljust(16)
                yield
        finally:
            noted[:] = (self.stages[-1].name if self.stages else "between").encode().ljust(16)

    Activity.stage = stage  # type: ignore[method-assign]
    return noted


class Killer:
    """Kills processes of one run after the other.

    Args:
        victims: a subset of `trainer`, `workers` and `engine`.
        mark: identifies the runs' processes, which inherit it in their environment.
        seconds: duration of a run, which is killed about twice in that time. It is too long if the machine was busy; a
            run that is not hit may lower it.
        stage: see `noted_stage`.
    """

    def __init__(self, runs: Killed, victims: Sequence[str], mark: str, seconds: float, stage: mmap.mmap) -> None:
        self.runs, self.victims, self.mark, self.seconds, self.stage = runs, victims, mark, seconds, stage
        self.hits: list[tuple[str, str]] = []  # what of this run was killed, and in which stage

    def play(self, folder: Path, unbroken: Path | None, draws: random.Random) -> dict[str, Any]:
        """Play a whole run and return its hits and what is wrong with it in the end."""
        self.hits, self.draws = [], draws
        shutil.rmtree(folder, ignore_errors=True)
        wrong = []
        try:
            while not (ended := self.kill(folder)) and self.draws.random() < AGAIN:
                pass
            if not ended:
                self.runs.finish(folder)
            check(folder, unbroken)
        except (RuntimeError, AssertionError, OSError, ValueError) as error:
            wrong.append(f"{type(error).__name__}: {error}"[-3000:])
        left = left_of(self.mark)
        if left:
            wrong.append(f"processes {left} are left")
        return {"hits": self.hits, "wrong": wrong}

    def kill(self, folder: Path) -> bool:
        """Start or resume the run and kill its processes until it ends, its trainer is killed, or it reports that it
        can't start. Return True only if it ended successfully."""
        from tests.runtime.episode_world import kill_workers

        self.stage[:] = b"start".ljust(16)
        pid, began = self.runs.start(folder), time.monotonic()
        while True:
            moment, ended, status = time.monotonic() + self.seconds * self.draws.random(), 0, 0
            while not ended and time.monotonic() < moment:
                time.sleep(0.005)
                ended, status = os.waitpid(pid, os.WNOHANG)
            if ended and not self.hits:
                self.seconds = min(self.seconds, time.monotonic() - began)
            if status and not any(words in self.runs.errors.read_text(encoding="utf-8") for words in REFUSED):
                raise RuntimeError(
                    f"ended with status {status}: {self.runs.errors.read_text(encoding='utf-8')[-2500:]}"
                )
            if ended:
                self.hits += [("start refused", "start")] * bool(status)
                return not status
            what, stage, hit = self.draws.choice(self.victims), self.stage[:].decode().strip(), True
            if what == "engine":
                engines = commands(self.mark, "proxima.engine")
                hit = bool(engines)
                for engine in engines:
                    with suppress(OSError):
                        os.kill(engine, signal.SIGKILL)
            elif what == "workers":
                hit = bool(kill_workers(self.mark, self.draws))
            else:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self.hits += [(what, stage)] * hit
            if what == "trainer":
                return False


def lines(file: Path, kind: str) -> list[dict[str, Any]]:
    """Return the runs of a kind so far."""
    if file.exists():
        records = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    else:
        records = []
    return [line for line in records if line["kind"] == kind]


def kills_of(runs: Sequence[dict[str, Any]]) -> Counter[str]:
    """Count the kills by kind of run and victim."""
    return Counter(f"{run['kind']} {what}" for run in runs for what, _ in run["hits"] if what != "start refused")


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Summarise the kills by victim and by the stage that they hit, the runs, and what was wrong with them."""
    stages = defaultdict[str, Counter[str]](Counter)
    for run in runs:
        for what, stage in run["hits"]:
            stages[f"{run['kind']} {what}"][stage] += 1
    return {
        "kills": dict(kills_of(runs)),
        "stages": stages,
        "runs": len(runs),
        "runs_as_expected": sum(not run["wrong"] for run in runs),
        "wrong": [f"{run['kind']} {run['hits']}: {wrong}" for run in runs for wrong in run["wrong"]],
        "commits": sorted({run["commit"] for run in runs}),
    }


def commands(mark: str, part: str) -> list[int]:
    """Return the processes of a campaign whose command contains `part`."""
    from tests.runtime.episode_world import marked

    pids = []
    for pid in marked(mark):
        with suppress(OSError):
            pids += [pid] if part.encode() in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return pids


def check(folder: Path, unbroken: Path | None) -> None:
    """Raise AssertionError if a prompt is lost or duplicated, an episode failed, or a synchronous run differs from the
    unbroken one."""
    from tests.runtime.episode_world import whole
    from tests.runtime.test_async_run import assert_whole
    from tests.runtime.tiny_run import assert_same

    records = assert_whole(folder, steps=STEPS)
    assert not any(record["episode/failed"] for record in records), "an episode failed"
    if unbroken is not None:
        assert_same(whole(folder), whole(unbroken))


def left_of(mark: str) -> list[int]:
    """Return the processes of a campaign that are still running after up to 20 s."""
    from tests.runtime.episode_world import marked

    deadline = time.monotonic() + 20
    while (left := marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


def main() -> None:
    parser = harness.parser(__doc__, repeats=1)
    parser.add_argument("--kills", type=int, default=100, help="in runs of each kind (default: %(default)s)")
    parser.add_argument("--kinds", nargs="+", default=[*RECIPES], choices=RECIPES, help="of runs (default: both)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: %(default)s)")
    kept = harness.CACHE / "kills_episodes.jsonl"
    parser.add_argument("--runs", type=Path, default=kept, help="file of the runs, which is continued (below .cache/)")
    options = parser.parse_args()
    options.runs.parent.mkdir(parents=True, exist_ok=True)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        outcome = campaign(Path(place), options.runs, options.kills, options.seed, options.kinds)
    print(harness.table(["killed", "times"], [[name, str(count)] for name, count in sorted(outcome["kills"].items())]))
    for line in [f"{len(outcome['wrong'])} wrong", *outcome["wrong"]]:
        print(line, file=sys.stderr)
    harness.finish(outcome | {"seed": options.seed}, options.json_out)


if __name__ == "__main__":
    harness.command(main)
