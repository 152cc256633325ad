"""The time until `proxima --help` has printed, and until a Python process that imports nothing has ended."""

import sys
from subprocess import DEVNULL
from subprocess import run as run_process
from time import perf_counter

from benchmarks.harness import HERE, Spread, finish, parser, table

COMMANDS = {
    "--help": ["-m", "proxima.cli.main", "--help"],
    "train --help": ["-m", "proxima.cli.main", "train", "--help"],
}
COMMANDS["python alone"] = ["-c", "pass"]


def main() -> None:
    o = parser(__doc__, repeats=9).parse_args()
    runs: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(o.repeats):
        for name, words in COMMANDS.items():
            begin = perf_counter()
            run_process([sys.executable, *words], check=True, stdout=DEVNULL, cwd=HERE.parent)
            runs[name].append(perf_counter() - begin)
    seconds = {name: Spread(values) for name, values in runs.items()}
    print(table(["command", "seconds"], [[name, spread.text(".2f")] for name, spread in seconds.items()]))
    finish(
        {
            "claim": "startup",
            "ratio": round(seconds["--help"].median / seconds["python alone"].median, 2),
            "seconds": {name: spread.json() for name, spread in seconds.items()},
            "threads": o.threads,
        },
        o.json_out,
    )
