"""Compare, on stale data, segment-wise with decoupled PPO, and log-linear with recomputed proximal log-probs."""

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Spread, finish, parser, table
from benchmarks.long_tail import figures, make_model, mean_interval, recipe, run

#: sides: what changes in the algorithm
ALGORITHMS: dict[str, dict[str, Any]] = {
    "decoupled": {"preset": "decoupled"},
    "sdp": {"preset": "sdp"},
    "sdp, trainer": {"preset": "sdp", "next_from": "trainer"},
    "sdp, bf16 engine": {"preset": "sdp"},
    "sdp, trainer, bf16 engine": {"preset": "sdp", "next_from": "trainer"},
    "loglinear": {"preset": "decoupled", "proximal": "loglinear"},
}
LAGS = (2, 4)
COMPARED = ("accuracy", "reward")


def plan(seeds: Sequence[int]) -> list[tuple[int, str, int]]:
    """Return the seed, side and lag of each run; sides that only show their weights get one seed."""
    trained = {("sdp", LAGS[1]), *((side, lag) for side in ("decoupled", "loglinear") for lag in LAGS)}
    pairs = [(side, lag) for lag in reversed(LAGS) for side in ALGORITHMS]
    return [(seed, *pair) for seed in seeds for pair in pairs if seed == seeds[0] or pair in trained]


def weights(records: Sequence[Mapping[str, Any]], lag: int) -> dict[str, float]:
    """Return the standard deviation of the loss tokens' unbounded weights, pooled over the steps once the lag is
    reached: of the correction's weights, and of the same tokens' weights towards the trainer's policy at the step."""
    steps = [r for r in records if r["kind"] == "train"][lag + 2 :]

    def pooled(key: str) -> float:
        return math.sqrt(statistics.fmean(r[key] ** 2 for r in steps))

    return {
        "std_correction": (own := pooled("correction/rollout_is_std")),
        "std_current": (current := pooled("mismatch/rollout_is_std")),
        "std_ratio": own / current,
        "missing": statistics.fmean(r.get("next/missing_fraction", 0.0) for r in steps),
    }


def main() -> None:
    p = parser(__doc__, repeats=1)  # one measurement per seed
    p.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    p.add_argument("--steps", type=int, default=16, help="of each run (default: %(default)s)")
    p.add_argument("--lr", type=float, default=5e-3, help="learning rate (default: %(default)s)")
    p.add_argument("--sides", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS), help="(default: all)")
    p.add_argument("--keep", type=Path, help="a file of finished runs, which are not made again; new ones are added")
    o = p.parse_args()
    if o.keep and o.keep.exists():
        kept = [json.loads(line) for line in o.keep.read_text(encoding="utf-8").splitlines()]
    else:
        kept = []
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        model = make_model(Path(place) / "model")
        for seed, side, lag in plan(o.seeds):
            settings = {"side": side, "lag": lag, "seed": seed, "steps": o.steps, "lr": o.lr}
            matching = [earlier for earlier in kept if settings.items() <= earlier.items()]
            if not matching and side in o.sides:
                tree = recipe(model, seed, steps=o.steps, lr=o.lr)
                tree["algorithm"] = ALGORITHMS[side]
                tree["engine"]["dtype"] = "bfloat16" if "bf16" in side else "float32"
                tree["train"]["updates_per_step"] = 2  # with one, recomputing costs nothing: it is the update's forward
                tree["runtime"] |= {"max_lag": lag, "max_concurrent_rollouts": 8 * (lag + 1)}
                load = round(os.getloadavg()[0], 1)
                records = run(Path(place) / str(len(runs)), tree)
                matching = [settings | {"load": load} | figures(records, lag + 2) | weights(records, lag)]
                print(f"  {json.dumps(matching[0])}", file=sys.stderr, flush=True)
                if o.keep:
                    with o.keep.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(matching[0]) + "\n")
            runs += matching
    result = report(runs, o.steps)
    finish({"claim": "segment_wise", **result, "runs": runs, "steps": o.steps, "lr": o.lr}, o.json_out)


def report(runs: Sequence[Mapping[str, Any]], steps: int) -> dict[str, Any]:
    """Print the tables and return the figures of the claim."""

    def some(side: str, lag: int) -> list[Mapping[str, Any]]:
        return [run for run in runs if (run["side"], run["lag"]) == (side, lag)]

    print(f"{steps} steps of 8 prompts x 8 completions\n\nStandard deviation of the weights of the same tokens\n")
    rows, ratios = list[list[str]](), dict[str, list[float]]()
    for side in [side for side in ALGORITHMS if "sdp" in side]:
        for lag in LAGS:
            if not some(side, lag):
                continue
            ratio = Spread([run["std_ratio"] for run in some(side, lag)])
            ratios[f"{side}, lag {lag}"] = ratio.json()
            names = ("std_correction", "std_current", "lag_mean")
            middle = [f"{Spread([run[k] for run in some(side, lag)]).median:.3f}" for k in names]
            missing = max(run["missing"] for run in some(side, lag))
            rows.append([side, str(lag), *middle, ratio.text(".2f"), f"{missing:.2%}"])
    print(table(["side", "max_lag", "segment-wise", "decoupled", "mean lag", "ratio", "missing"], rows))
    print("\nAccuracy on held-out prompts, and CPU of the trainer's process\n")
    shown = ("accuracy", "reward", "train_cpu_seconds", "lag_mean")
    cells = [
        [side, str(lag), *(Spread([run[k] for run in matching]).text(".3f") for k in shown), str(len(matching))]
        for lag in LAGS
        for side in ("decoupled", "sdp", "loglinear")
        if (matching := some(side, lag))
    ]
    print(table(["side", "max_lag", *shown, "seeds"], cells) + "\n")
    result: dict[str, Any] = {"std_ratio": ratios}
    for side, lag in (("sdp", LAGS[1]), ("loglinear", LAGS[0]), ("loglinear", LAGS[1])):
        pairs = [(a, b) for a in some(side, lag) for b in some("decoupled", lag) if a["seed"] == b["seed"]]
        if not pairs:
            continue
        differences = {k: mean_interval([a[k] - b[k] for a, b in pairs]) for k in COMPARED}
        cpu = Spread([a["cpu_a_token"] / b["cpu_a_token"] for a, b in pairs])
        result[f"{side} - decoupled, lag {lag}"] = {k: [round(x, 4) for x in v] for k, v in differences.items()}
        result[f"{side} / decoupled, lag {lag}, CPU of the trainer a token"] = cpu.json()
        line = ", ".join(f"{k} {m:+.3f} [{low:+.3f}, {high:+.3f}]" for k, (m, low, high) in differences.items())
        print(f"{side} - decoupled at lag {lag}: {line}; CPU of the trainer a token: {cpu.text('.2f')} times")
    print()
    return result
