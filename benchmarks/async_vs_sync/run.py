"""Compare asynchronous with synchronous training at equal samples, on completion lengths with a long tail."""

import json
import os
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Spread, finish, parser, table
from benchmarks.long_tail import figures, make_model, mean_interval, recipe, run

SHOWN = {
    "idle_trainer": ".0%",
    "idle_engine": ".0%",
    "tokens_per_second": ",.0f",
    "seconds": ",.0f",
    "cpu_seconds": ",.0f",
    "lag_mean": ".2f",
    "lag_max": ".0f",
    "accuracy": ".3f",
    "reward": ".3f",
}
RATIOS = ("idle_trainer", "tokens_per_second", "seconds", "cpu_seconds")


def main() -> None:
    p = parser(__doc__, repeats=1)  # one measurement per seed
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument("--steps", type=int, default=20, help="of each run (default: %(default)s)")
    p.add_argument("--lag", type=int, default=2, help="runtime.max_lag (default: %(default)s)")
    p.add_argument("--concurrent", type=int, default=12, help="prompts that generate at once (default: %(default)s)")
    o = p.parse_args()
    sides = {"sync": {"max_lag": 0}, "async": {"max_lag": o.lag, "max_concurrent_rollouts": o.concurrent}}
    by_side: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as place:
        model = make_model(Path(place) / "model")
        for i, seed in enumerate(o.seeds):
            for side in list(sides)[:: 1 if i % 2 == 0 else -1]:
                tree = recipe(model, seed, steps=o.steps)
                tree["train"]["epochs_per_step"] = 2  # so that generation and training take about the same time
                tree["runtime"] |= sides[side]
                load = os.getloadavg()[0]
                figure = figures(run(Path(place) / f"{side}-{seed}", tree)) | {"seed": seed, "load": round(load, 1)}
                by_side[side].append(figure)
                print(f"  {side}: {json.dumps(figure)}", file=sys.stderr, flush=True)
    print(f"{o.steps} steps of 8 prompts x 8 completions, one thread a process; median [range] of the seeds\n")
    rows = [
        [side, *(Spread([figure[k] for figure in some]).text(form) for k, form in SHOWN.items())]
        for side, some in by_side.items()
    ]
    print(table(["side", *SHOWN], rows))
    pairs = list(zip(by_side["async"], by_side["sync"], strict=True))
    ratios = {k: Spread([a[k] / s[k] for a, s in pairs]) for k in RATIOS}
    differences = {k: mean_interval([a[k] - s[k] for a, s in pairs]) for k in ("accuracy", "reward")}
    print("\nasync / sync, pair by pair: " + ", ".join(f"{k} {ratio.text('.2f')}" for k, ratio in ratios.items()))
    for k, (mean, low, high) in differences.items():
        print(f"async - sync, held-out {k}: {mean:+.3f}, 95 % of the seeds' mean in [{low:+.3f}, {high:+.3f}]")
    print()
    reached = ratios["idle_trainer"].median <= 0.5 and ratios["tokens_per_second"].median > 1
    finish(
        {
            "claim": "async_vs_sync",
            "reached": reached and all(low <= 0 <= high for _, low, high in differences.values()),
            "ratios": {k: ratio.json() for k, ratio in ratios.items()},
            "differences": {k: [round(x, 4) for x in values] for k, values in differences.items()},
            "runs": by_side,
            "steps": o.steps,
            "lag": o.lag,
            "concurrent": o.concurrent,
        },
        o.json_out,
    )
