"""Segment-wise against decoupled weights: `make evidence CLAIM=segments`."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from evidence.curves import (
    Outcome,
    Run,
    cell_mean,
    difference,
    mean,
    measured,
    panel,
    print_table,
    run_claim,
    shown,
    told,
)
from evidence.figure import draw
from evidence.segments.run import CHAINS, LAGS, WEIGHTINGS, has_every_gradient
from proxima.experiments.cell_statistics import SeedMean, mean_over_seeds
from proxima.system.jsonl import read_lines

CLAIM = Path(__file__).parent
STORED = CLAIM / "stored.jsonl"
STEPS, MARGIN, OLD = 60, 0.02, 0.75
CURVES = {  # cells of `sweep.yaml` and `learning.yaml`: title, lag, prediction
    "4": ("lag 4, rate 1e-4", 4, "S3"),
    "8": ("lag 8, rate 1e-4", 8, "S3"),
    "lag_2": ("lag 2, rate 4e-5", 2, "shown"),
    "lag_4": ("lag 4, rate 4e-5", 4, "S4"),
    "lag_8": ("lag 8, rate 4e-5", 8, "S4"),
    "lag_8_slow": ("lag 8, rate 2e-5", 8, "shown"),
}
BOTH = ("decoupled", "segment-wise")
Line = Mapping[str, Any]


def report(runs: Sequence[Run]) -> None:
    chains = read_lines(STORED)
    whole = sum(all(map(has_every_gradient, line["lags"].values())) for line in chains)
    print(f"\n{len(chains)} of {CHAINS} chains of stored answers, {whole} of them with every gradient.\n")
    print("| lag | weights | deviation of log w | effective share | outside [.2, 5] |\n|---|---|---|---|---|")
    for lag in LAGS:
        for name in BOTH:
            cells = [shown(over(chains, lag, "weights", name, k)) for k in ("deviation", "effective", "outside")]
            print(f"| {lag} | {name} | {' | '.join(cells)} |")
    keys = ("bias", "variance", "cosine", "batch_cosine")
    print("\n| lag | weights | bias² | variance | cosine | of a batch |\n|---|---|---|---|---|---|")
    for lag in LAGS:
        for name in WEIGHTINGS if whole else ("none", "decoupled"):
            print(f"| {lag} | {name} | {' | '.join(shown(over(chains, lag, 'gradients', name, k)) for k in keys)} |")
    fresh = [shown(mean_over_seeds([line["fresh"][key] for line in chains])) for key in keys]
    print(f"| 0 | fresh answers | {' | '.join(fresh)} |\n")
    print(f"- S1, effective share at lag 8, segment-wise − decoupled: {gap(chains, 8, 'weights', 'effective')}")
    for lag in (4, 8):
        steadier = gap(chains, lag, "gradients", "batch_cosine")
        print(f"- S2, cosine of a batch at lag {lag}, segment-wise − decoupled: {steadier}")
        print(f"- S2, of the means: {gap(chains, lag, 'gradients', 'cosine')}")
    arms = {"decoupled": "decoupled", "sdp": "segment-wise"}
    columns: dict[str, tuple[Outcome, int]] = {
        "mean reward": (mean("reward", STEPS), 3),
        "last five": (mean("reward", STEPS, last=5), 3),
        "age, last 30": (measured("age", STEPS - 30, STEPS), 2),
        "interrupted": (measured("interrupted", 0, STEPS), 3),
        "without next": (measured("missing", 0, STEPS), 4),
    }
    print_table(runs, [f"{curve},algorithm={name}" for curve in CURVES for name in arms], columns)
    panels = []
    for curve, (title, lag, prediction) in CURVES.items():
        cells = {f"{curve},algorithm={name}": name for name in arms}
        decoupled, sdp = cells
        found = difference(runs, sdp, decoupled, mean("reward", STEPS))
        age = measured("age", STEPS - 30, STEPS)
        ages = [cell_mean(runs, cell, age) for cell in cells]
        aged = all(of is not None and of.mean >= OLD * lag for of in ages)
        judged = "" if aged else f", not judged: a mean age is below {OLD * lag:g}"
        print(f"- {prediction}, mean reward at {title}, segment-wise − decoupled: {told(found, MARGIN)}{judged}")
        lines = [dict(run) | {"cell": arms[cells[run["cell"]]]} for run in runs if run["cell"] in cells]
        panels.append(panel(lines, list(arms.values()), "reward", STEPS, title=title, y="share right"))
    draw(CLAIM / "segments.svg", panels, columns=2)


def over(chains: Sequence[Line], lag: int, what: str, name: str, key: str) -> SeedMean | None:
    found = [line["lags"][str(lag)][what] for line in chains]
    return mean_over_seeds([of[name][key] for of in found if name in of])


def gap(chains: Sequence[Line], lag: int, what: str, key: str) -> str:
    """The difference of segment-wise and decoupled, paired by chain."""
    found = [line["lags"][str(lag)][what] for line in chains]
    both = [of for of in found if all(name in of for name in BOTH)]
    if not both:
        return "open, no chain has both"
    return told(mean_over_seeds([of[BOTH[1]][key] - of[BOTH[0]][key] for of in both]), MARGIN)


def stored() -> None:
    subprocess.run([sys.executable, "-m", "evidence.segments.run", "--out", str(STORED)], check=True)


if __name__ == "__main__":
    run_claim(__file__, report, "sweep", "learning", beside=stored)
