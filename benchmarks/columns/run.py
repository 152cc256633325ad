"""Compare numpy columns with Python objects in trajectories, packing and rollout writing."""

import io
import subprocess
import tarfile
from pathlib import Path

from benchmarks.harness import CACHE, HERE, Side, Spread, alternate, finish, parser, table

BASE = "edd15e6"  # the last commit with a Python object per token
STAGES = ("trajectories", "pack", "write")


def base_source() -> Path:
    """Return the source tree of BASE, extracted below .cache/ once."""
    place = CACHE / f"proxima-{BASE}"
    if not place.exists():
        archive = subprocess.run(["git", "archive", BASE, "src"], cwd=HERE.parent, capture_output=True, check=True)
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(place, filter="data")
    return place / "src"


def main() -> None:
    p = parser(__doc__, repeats=3)
    p.add_argument("--shape", default="1024x4096", metavar="COMPLETIONSxTOKENS", help="(default: %(default)s)")
    p.add_argument("--base", type=Path, help=f"src folder of the other version (default: that of {BASE}, from git)")
    o = p.parse_args()
    completions, tokens = map(int, o.shape.split("x"))
    settings = {"completions": completions, "tokens": tokens, "threads": o.threads}
    sources = {"objects": o.base or base_source(), "columns": HERE.parent / "src"}
    sides = [Side(name, "columns.side", settings, threads=o.threads, source=path) for name, path in sources.items()]
    about = {side.name: side.about for side in sides}
    measured = alternate(sides, o.repeats)
    seconds = {
        name: {stage: Spread([x[stage] for x in runs]) for stage in STAGES}
        | {"all": Spread([sum(x[stage] for stage in STAGES) for x in runs])}
        for name, runs in measured.items()
    }
    count = completions * tokens
    peak = {name: (runs[-1]["peak_bytes"]) / count for name, runs in measured.items()}
    held = {name: about[name]["held_bytes"] / count for name in sources}
    rows = [
        [
            name,
            *(seconds[name][stage].text(".3f") for stage in (*STAGES, "all")),
            f"{held[name]:.1f}",
            f"{peak[name]:.1f}",
        ]
        for name in sources
    ]
    print(f"{o.shape} tokens, {o.threads} threads; CPU seconds, median [min-max] of {o.repeats}, in turn\n")
    print(table(["side", *STAGES, "all", "bytes held per token", "bytes per token at the peak"], rows))
    faster = round(seconds["objects"]["all"].median / seconds["columns"]["all"].median, 2)
    smaller = {"held": round(held["objects"] / held["columns"], 2), "peak": round(peak["objects"] / peak["columns"], 2)}
    memory = f"{smaller['held']:.1f} times less memory held, {smaller['peak']:.1f} at the peak"
    print(f"\n{faster:.1f} times as fast; {memory}.\n")
    finish(
        {
            "claim": "columns",
            "ratio": faster,
            "memory_ratio": smaller,
            "seconds": {name: {stage: t.json() for stage, t in stages.items()} for name, stages in seconds.items()},
            "bytes_per_token": {"held": held, "peak": peak},
            "base": BASE,
            "shape": o.shape,
            "threads": o.threads,
        },
        o.json_out,
    )
