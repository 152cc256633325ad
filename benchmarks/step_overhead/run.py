"""Compare the CPU time of one step outside the model and the decoder with that of another commit of proxima."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import CACHE, HERE, Spread, finish, parser, table

ROOT = HERE.parent


def checkout(commit: str) -> Path:
    """Extract the source tree of a commit below .cache/ and return its folder."""
    place = CACHE / f"proxima-{commit}-whole"
    if not (place / "src").is_dir():
        place.mkdir(parents=True, exist_ok=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "-x", "-C", str(place)], input=archive, check=True)
    return place


def measure(source: Path, settings: list[str]) -> dict[str, float]:
    """Run side.py once on a source tree, on one thread."""
    command = [sys.executable, str(Path(__file__).with_name("side.py")), "--source", str(source), *settings]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment.pop("PYTHONPATH", None)
    answer = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd="/")
    return dict(json.loads(answer.stdout.splitlines()[-1]))


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--base", default="edd15e6", help="commit to compare with (default: %(default)s)")
    p.add_argument("--prompts", type=int, default=32)
    p.add_argument("--completions", type=int, default=8)
    p.add_argument("--tokens", type=int, default=512)
    o = p.parse_args()
    settings = [f"--{name}={getattr(o, name)}" for name in ("prompts", "completions", "tokens")]
    sources = {o.base: checkout(o.base), "now": ROOT}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in sources}
    for _ in range(o.repeats):
        for name, source in sources.items():
            runs[name].append(measure(source, settings))
    columns = ("host", "decoder", "sampling", "model", "total")
    spreads = {name: {key: Spread([run[key] for run in some]) for key in columns} for name, some in runs.items()}
    tokens = runs["now"][0]["tokens"]
    print(
        f"CPU seconds of a step of {o.prompts * o.completions} completions x {o.tokens} tokens, tiny model, one thread;"
    )
    print(f"median [min-max] of {o.repeats}, in turn\n")
    print(table(["side", *columns], [[name, *(spreads[name][key].text(".3f") for key in columns)] for name in spreads]))
    ratio = spreads["now"]["host"].median / spreads[o.base]["host"].median
    print(
        f"\nThe host takes {ratio:.0%} of what it took; "
        f"{spreads['now']['host'].median / tokens * 1e6:.2f} us a token.\n"
    )
    seconds = {name: {key: spread.json() for key, spread in some.items()} for name, some in spreads.items()}
    finish({"claim": "step_overhead", "ratio": round(ratio, 4), "seconds": seconds, "tokens": tokens}, o.json_out)


if __name__ == "__main__":
    main()
