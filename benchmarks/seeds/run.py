"""Does the demo learn every time? Held-out accuracy of the quickstart recipe over seeds and algorithms."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed

from benchmarks.harness import CACHE, HERE, finish, need_model, parser, table

#: the accuracy from which a run has learned
AT_LEAST = 0.85


def main() -> None:
    p = parser(__doc__, repeats=1)  # a run is deterministic: there is nothing to repeat
    p.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="of the first algorithm (default: %(default)s)"
    )
    p.add_argument(
        "--algorithms", nargs="+", default=["cppo", "grpo", "dppo", "drpo"], help="presets (default: %(default)s)"
    )
    p.add_argument("--grid", action="store_true", help="every algorithm with every seed, not only with the first one")
    p.add_argument(
        "--jobs", type=int, default=1, help="runs at a time; take cores / jobs for --threads (default: %(default)s)"
    )
    p.add_argument(
        "--set",
        dest="override",
        nargs="*",
        default=[],
        metavar="key=value",
        help="as for `proxima train`, for every run",
    )
    o = p.parse_args()
    model = need_model(o.model)
    first, seed = o.algorithms[0], o.seeds[0]
    runs = [(algorithm, s) for s in o.seeds for algorithm in o.algorithms if o.grid or algorithm == first or s == seed]
    with ThreadPoolExecutor(o.jobs) as pool:
        waiting = [pool.submit(one, model, algorithm, seed, o.threads, o.override) for algorithm, seed in runs]
        for done in as_completed(waiting):
            print(f"  {json.dumps(done.result())}", file=sys.stderr, flush=True)
    results = [done.result() for done in waiting]
    rows = [
        [
            x["algorithm"],
            str(x["seed"]),
            f"{x['before']:.3f}",
            f"{x['after']:.3f}",
            f"{x['correct']}/{x['questions']}",
            f"{x['minutes']:.1f}",
        ]
        for x in results
    ]
    print(
        f"recipes/quickstart.yaml {' '.join(o.override)}".rstrip()
        + f", {o.threads} threads; greedy, on questions that were not trained on\n"
    )
    print(table(["algorithm", "seed", "before", "after", "right", "minutes"], rows))
    worst = min(x["after"] for x in results)
    print(f"\nworst {worst:.3f}; {'every run' if worst >= AT_LEAST else 'NOT every run'} reaches {AT_LEAST}\n")
    finish(
        {"claim": "seeds", "worst": worst, "reached": worst >= AT_LEAST, "runs": results, "threads": o.threads},
        o.json_out,
    )


def one(model: str, algorithm: str, seed: int, threads: int, override: list[str]) -> dict[str, object]:
    """Train once and return the figures of summary.json."""
    folder = CACHE / "seeds" / f"{algorithm}-{seed}"
    command = [sys.executable, "-m", "proxima.cli.main", "train", "recipes/quickstart.yaml", "--overwrite", "--quiet"]
    values = [
        f"folder={folder}",
        f"model.path={model}",
        f"algorithm={algorithm}",
        f"seed={seed}",
        f"runtime.threads={threads}",
        *override,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    subprocess.run([*command, *values], cwd=HERE.parent, check=True, stdout=sys.stderr, env=environment)
    shutil.rmtree(folder / "checkpoints")  # 1.6 GB a run, and no run is resumed from them
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
