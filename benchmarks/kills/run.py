"""Kill a run at random moments and file operations, resume it, and compare it with one that was not killed."""

import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import harness

OPERATIONS = ("rename", "replace", "fsync", "unlink", "remove", "rmdir", "mkdir", "link", "truncate", "ftruncate")
HANGS = 600.0  # seconds after which a run's process prints its threads' stacks and exits
AGAIN = 0.3  # share of the kills followed by another during the resume


class Killed:
    """Runs of one recipe in forked processes.

    Args:
        root: a folder for the runs.
        recipe: returns the recipe for a model folder.
    """

    def __init__(self, root: Path, recipe: Callable[[Path], dict[str, Any]]) -> None:
        sys.path.insert(0, str(harness.HERE.parent))
        import torch

        from tests.runtime.tiny_run import go
        from tests.tiny import tiny_factory

        torch.set_num_threads(1)
        (root / "model").mkdir(parents=True)
        self.errors, self.counted = root / "errors.txt", root / "counted.txt"
        self.tree = recipe(tiny_factory(root / "model")("llama"))
        self.go = go

    def start(self, folder: Path, kill: Callable[[int, bool], bool] | None = None) -> int:
        """Start or resume the run in a fork and return its process id; `kill(number of the file operation, True once it
        is done)` decides where to kill it."""
        pid = os.fork()
        if pid:
            return pid
        code = 9
        try:
            for stream in (1, 2):
                os.dup2(os.open(self.errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), stream)
            # a test captures those of Python
            sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False, encoding="utf-8")
            faulthandler.dump_traceback_later(HANGS, exit=True, file=2)
            count = watch_operations(kill)
            status = self.go(folder, self.tree, resume=(folder / "run.sqlite").exists()).status
            self.counted.write_text(str(count[0]), encoding="utf-8")
            code = 0 if status == "done" else 3
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def finish(self, folder: Path) -> None:
        """Run or resume to the end."""
        status = os.waitpid(self.start(folder), 0)[1]
        if status:
            raise RuntimeError(f"ended with status {status}: {self.errors.read_text(encoding='utf-8')[-2500:]}")


def watch_operations(kill: Callable[[int, bool], bool] | None) -> list[int]:
    """Count the file operations of this process, and kill it where `kill` returns True."""
    count = [0]

    def watched(module: Any, name: str) -> None:
        inner = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            count[0] += 1
            number = count[0]
            if kill is not None and kill(number, False):
                os.kill(os.getpid(), signal.SIGKILL)
            result = inner(*arguments, **options)
            if kill is not None and kill(number, True):
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(module, name, call)

    for name in OPERATIONS:
        watched(os, name)
    watched(shutil, "rmtree")
    return count


def synchronous(model: Path) -> dict[str, Any]:
    """Return a recipe of four steps: refill of uniform groups, pruning to half, a checkpoint per step, two kept."""
    from tests.runtime.tiny_run import recipe

    return recipe(
        model,
        train__steps=4,
        checkpoint={"every": 1, "keep_last": 2},
        engine__slots=8,
        reward=[{"kind": "tests.runtime.tiny_run:Even", "constant": 3}],
        algorithm={
            "preset": "grpo",
            "selection": [{"kind": "drop_uniform_groups", "metric": "reward"}, {"kind": "prune", "rate": 0.5}],
            "dynamic_sampling": {"max_num_gen_batches": 8},
        },
    )


def main() -> None:
    parser = harness.parser(__doc__, repeats=1)
    parser.add_argument("--kills", type=int, default=60, help="runs that are killed (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments (default: %(default)s)")
    beside = "kill trainer or engine of runs that generate beside the training"
    parser.add_argument("--asynchronous", action="store_true", help=beside)
    parser.add_argument("--whole", type=int, default=30, help="asynchronous: runs not killed (default: %(default)s)")
    own = "asynchronous: of the kills, those of runs whose engine has a process of its own (default: a fifth)"
    parser.add_argument("--processes", type=int, help=own)
    parser.add_argument("--minutes", type=float, default=600.0, help="asynchronous: begin no run after (default: 600)")
    options = parser.parse_args()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as place:
        draws = random.Random(options.seed)
        if options.asynchronous:
            from benchmarks.kills import asynchronous

            if options.processes is None:
                processes = options.kills // 5
            else:
                processes = options.processes
            outcome = asynchronous.campaign(
                Path(place), options.kills, processes, options.whole, options.minutes, draws
            )
            print(asynchronous.table(outcome))
        else:
            outcome = campaign(Path(place), options.kills, draws)
            cells = [str(outcome["kills"]), str(outcome["ended_before"]), str(len(outcome["wrong"]))]
            print(harness.table(["kills", "ended before", "wrong"], [cells]))
    for line in outcome["wrong"]:
        print(line, file=sys.stderr)
    harness.finish(outcome | {"seed": options.seed}, options.json_out)


def campaign(root: Path, kills: int, draws: random.Random) -> dict[str, Any]:
    """Kill, resume and compare, `kills` times."""
    runs = Killed(root, synchronous)
    from tests.runtime.tiny_run import traces

    whole, folder = root / "whole", root / "run"
    began = time.monotonic()
    runs.finish(whole)
    seconds, operations = time.monotonic() - began, int(runs.counted.read_text(encoding="utf-8"))
    expected, files = traces(whole), files_of(whole)
    wrong: list[str] = []
    ended = 0
    for number in range(kills):
        shutil.rmtree(folder, ignore_errors=True)
        while True:
            at, done = draws.randrange(1, operations + 1), number % 3 == 1
            if number % 3 == 0:
                pid = runs.start(folder)
                time.sleep(draws.random() * seconds)
                os.kill(pid, signal.SIGKILL)
            else:
                pid = runs.start(folder, lambda n, after, at=at, done=done: (n, after) == (at, done))
            ended_itself = os.WIFEXITED(os.waitpid(pid, 0)[1])
            ended += ended_itself
            if ended_itself or draws.random() > AGAIN:
                break
        try:
            runs.finish(folder)
            got = traces(folder)
            differs = [name for name in expected if got[name] != expected[name]]
            left = sorted(files_of(folder) ^ files)
            if differs or left:
                wrong.append(f"kill {number}: differs: {differs}; files: {left[:5]}")
        except (RuntimeError, OSError, ValueError) as error:
            wrong.append(f"kill {number}: {error}")
        if (number + 1) % 20 == 0:
            print(f"  {number + 1} of {kills}, {len(wrong)} wrong", file=sys.stderr, flush=True)
    return {"kills": kills, "ended_before": ended, "wrong": wrong, "file_operations": operations}


def files_of(folder: Path) -> set[str]:
    """Return the names of all files except those that record how often the run was resumed."""
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file() and p.suffix not in (".txt", ".lock")}
