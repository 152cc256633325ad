"""Measure the time of `proxima --help`, of a Python process that imports nothing, and from `proxima train quickstart`
to its first tokens and the end of its first step."""

import json
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from subprocess import DEVNULL
from subprocess import run as run_process
from time import perf_counter

from benchmarks.harness import HERE, Spread, finish, need_model, parser, table

COMMANDS = {
    "--help": ["-m", "proxima.cli.main", "--help"],
    "train --help": ["-m", "proxima.cli.main", "train", "--help"],
}
COMMANDS["python alone"] = ["-c", "pass"]
ONE_STEP = ("train.steps=1", "train.warmup_steps=0", "eval.before=false", "eval.after=false", "checkpoint.every=0")


def main() -> None:
    p = parser(__doc__, repeats=9)
    p.add_argument("--runs", type=int, default=3, help="of one step (default: %(default)s)")
    p.add_argument("--set", nargs="*", default=[], help="further overrides of these")
    o = p.parse_args()
    runs: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(o.repeats):
        for name, words in COMMANDS.items():
            begin = perf_counter()
            run_process([sys.executable, *words], check=True, stdout=DEVNULL, cwd=HERE.parent)
            runs[name].append(perf_counter() - begin)
    seconds = {name: Spread(values) for name, values in runs.items()}
    print(table(["command", "seconds"], [[name, spread.text(".2f")] for name, spread in seconds.items()]))
    words = [f"model.path={need_model(o.model)}", f"runtime.threads={o.threads}", *ONE_STEP, *o.set]
    words = [*{word.partition("=")[0]: word for word in words}.values()]
    measured = [one_step(words) for _ in range(o.runs)]
    until = {phase: Spread([run[phase] for run in measured]) for phase in measured[0]}
    took = {
        phase: Spread([run[phase] - (run[before] if before else 0.0) for run in measured])
        for before, phase in pairwise(["", *measured[0]])
    }
    rows = [[phase, took[phase].text(".2f"), until[phase].text(".2f")] for phase in until]
    print(table(["proxima train quickstart", "seconds", "until then"], rows))
    finish(
        {
            "claim": "startup",
            "ratio": round(seconds["--help"].median / seconds["python alone"].median, 2),
            "seconds": {name: spread.json() for name, spread in seconds.items()},
            "train": {phase: spread.json() for phase, spread in took.items()},
            "until": {phase: spread.json() for phase, spread in until.items()},
            "threads": o.threads,
        },
        o.json_out,
    )


def one_step(words: list[str]) -> dict[str, float]:
    """Return the seconds from the command to the end of each phase of a run of one step."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "phases.json")
        command = [sys.executable, str(HERE / "startup" / "phases.py"), str(file), "train", "quickstart"]
        variables = {**os.environ, "START": str(time.monotonic())}
        run_process(
            [*command, f"folder={folder}/run", *words, "--quiet"],
            check=True, stdout=DEVNULL, stderr=DEVNULL, cwd=HERE.parent, env=variables,
        )  # fmt: skip
        return dict(json.loads(file.read_text()))
