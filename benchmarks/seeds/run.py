"""Does the demo learn every time? Held-out accuracy of the quickstart recipe over seeds and algorithms."""

import json
import shutil
import subprocess
import sys

from benchmarks.harness import CACHE, HERE, finish, need_model, parser, table

#: what "it learned" means here
AT_LEAST = 0.85


def main() -> None:
    p = parser(__doc__, repeats=1)
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of the recipe's own algorithm (default: %(default)s)")
    p.add_argument(
        "--algorithms", nargs="*", default=["grpo", "dppo", "drpo"], help="presets to run with the first seed (default: %(default)s)"
    )
    p.add_argument("--set", dest="override", nargs="*", default=[], metavar="key=value", help="as for `proxima train`, for every run")
    o = p.parse_args()
    model = need_model(o.model)
    runs = [("cppo", seed) for seed in o.seeds] + [(algorithm, o.seeds[0]) for algorithm in o.algorithms]
    found = []
    for algorithm, seed in runs:
        for _ in range(o.repeats):
            found.append(one(model, algorithm, seed, o.threads, o.override))
            print(f"  {json.dumps(found[-1])}", file=sys.stderr, flush=True)
    rows = [
        [
            x["algorithm"],
            str(x["seed"]),
            f"{x['before']:.3f}",
            f"{x['after']:.3f}",
            f"{x['correct']}/{x['questions']}",
            f"{x['minutes']:.1f}",
        ]
        for x in found
    ]
    print(
        f"recipes/quickstart.yaml {' '.join(o.override)}".rstrip()
        + f", {o.threads} threads; greedy, on questions that were not trained on\n"
    )
    print(table(["algorithm", "seed", "before", "after", "right", "minutes"], rows))
    worst = min(x["after"] for x in found)
    print(f"\nworst {worst:.3f}; {'every run' if worst >= AT_LEAST else 'NOT every run'} reaches {AT_LEAST}\n")
    finish({"claim": "seeds", "worst": worst, "reached": worst >= AT_LEAST, "runs": found, "threads": o.threads}, o.json_out)


def one(model: str, algorithm: str, seed: int, threads: int, override: list[str]) -> dict[str, object]:
    """Train once; what summary.json says of it."""
    folder = CACHE / "seeds" / f"{algorithm}-{seed}"
    command = [sys.executable, "-m", "proxima.cli.main", "train", "recipes/quickstart.yaml", "--overwrite", "--quiet"]
    values = [f"folder={folder}", f"model.path={model}", f"algorithm={algorithm}", f"seed={seed}", f"runtime.threads={threads}", *override]
    subprocess.run([*command, *values], cwd=HERE.parent, check=True, stdout=sys.stderr)
    shutil.rmtree(folder / "checkpoints")  # 1.6 GB a run, and nobody goes on from here
    summary = json.loads((folder / "summary.json").read_text())
    before, after = summary["eval"]["before"], summary["eval"]["after"]
    return {
        "algorithm": algorithm,
        "seed": seed,
        "before": before["accuracy"],
        "after": after["accuracy"],
        "correct": after["correct"],
        "questions": after["questions"],
        "steps": summary["steps"],
        "minutes": round(summary["seconds"] / 60, 2),
    }
