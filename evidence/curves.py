"""What the runs of a claim's sweep show: a line of results for each run, and paired differences over seeds."""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

from evidence.figure import Panel
from proxima.experiments.cell_statistics import SeedMean, mean_over_seeds, t_quantile
from proxima.experiments.run_reader import read_run
from proxima.experiments.sweep_file import read_sweep
from proxima.system.jsonl import read_lines

# The name in the results → that in metrics.jsonl, one value a step.
CURVES = {
    "reward": "reward/mean",
    "accuracy": "accuracy",
    "cut_off": "truncated_fraction",
    "kl": "approx_kl",
    "masked": "masked_fraction",
    "entropy": "entropy/mean",
    "length": "length/mean",
    "generated": "tokens/generated",
    "trained": "tokens/trained",
    "train_seconds": "time/train",
    "generate_seconds": "time/generate",
    "cpu": "time/cpu",
    "gap": "mismatch/log_prob_absdiff_mean",
    "k3": "mismatch/k3_kl",
    "age": "age/mean",
    "missing": "next/missing_fraction",
    "interrupted": "interrupted_fraction",
    "prompts": "prompts",
    "prompts_used": "prompts_used",
}
Run = Mapping[str, Any]
Outcome = Callable[[Run], float]


def sweep(claim: Path, *names: str) -> None:
    """Run the sweeps of a claim, or continue them, and write the lines of the runs that have ended to its results.
    Lines of runs whose folders are not here stay."""
    for name in names:
        code = subprocess.run([sys.executable, "-m", "proxima", "sweep", claim / f"{name}.yaml"]).returncode
        if code == 2:  # nothing was run; a run that fails is a result
            sys.exit(code)
    results = claim / "results.jsonl"
    here = [line for name in names for line in results_of(Path("runs/evidence") / claim.name / name, name)]
    lines = {(line["sweep"], line["cell"], line["seed"]): line for line in [*read_lines(results), *here]}
    results.write_text("".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8")


def results_of(folder: Path, sweep: str) -> list[dict[str, Any]]:
    """The runs of a sweep that have ended, by cell and seed. One that proxima ended before its last step, for numbers
    that are not finite, has `failed`, and shorter curves."""
    lines = []
    for place in sorted(folder.glob("*/seed-*")):
        if not (place / "summary.json").is_file():  # it runs, or was killed
            continue
        run = read_run(place, empty=True)
        ended = {"status": run.status, "after": ((run.summary.get("eval") or {}).get("after") or {}).get("accuracy")}
        curves = {name: [rounded(record.get(key)) for record in run.train] for name, key in CURVES.items()}
        lines.append({"sweep": sweep, "cell": place.parent.name, "seed": run.seed, **ended, **curves})
    return lines


def rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


def read(claim: Path) -> list[dict[str, Any]]:
    if not (claim / "results.jsonl").is_file():
        sys.exit(f"error: no results yet; make evidence CLAIM={claim.name} runs it")
    return read_lines(claim / "results.jsonl")


def mean(curve: str, steps: int, last: int | None = None) -> Outcome:
    """The mean of a curve over a run of `steps`, or over its last ones; a step that was not reached, or had nothing to
    update on, counts 0."""

    def outcome(run: Run) -> float:
        return total(run, curve, steps - (last or steps), steps) / (last or steps)

    return outcome


def measured(curve: str, start: int, stop: int) -> Outcome:
    """The mean of a curve over those steps in which it was measured; 0 if there is none."""

    def outcome(run: Run) -> float:
        values = [value for value in run[curve][start:stop] if value is not None]
        return float(sum(values) / max(1, len(values)))

    return outcome


def total(run: Run, curve: str, start: int = 0, stop: int | None = None) -> float:
    return float(sum(value or 0.0 for value in run[curve][start:stop]))


def after(run: Run) -> float:
    """The held-out accuracy at the end."""
    return float(run["after"] or 0.0)


def by_seed(runs: Sequence[Run], cell: str, outcome: Outcome) -> dict[int, float]:
    return {run["seed"]: outcome(run) for run in runs if run["cell"] == cell}


def cell_mean(runs: Sequence[Run], cell: str, outcome: Outcome) -> SeedMean | None:
    return mean_over_seeds(list(by_seed(runs, cell, outcome).values()))


def difference(runs: Sequence[Run], a: str, b: str, outcome: Outcome) -> SeedMean | None:
    """The outcome of cell `a` less that of `b`, paired by seed, over the seeds that both have."""
    of_a, of_b = by_seed(runs, a, outcome), by_seed(runs, b, outcome)
    return mean_over_seeds([of_a[seed] - of_b[seed] for seed in sorted(of_a.keys() & of_b.keys())])


def told(found: SeedMean | None, margin: float, unit: str = "seeds") -> str:
    """A difference, the seeds in which it is positive, what it says, and, where it says nothing, how many of them would
    decide, see `needed`.

    above: the 95 % interval lies above 0; below; the same: it lies within ± margin; else it can't be told.
    """
    if found is None or found.half is None:
        return "not measured"
    if found.low > 0 or found.high < 0:
        verdict = "above" if found.low > 0 else "below"
        verdict += ", but by less than the margin" if max(-found.low, found.high) < margin else ""
    elif max(-found.low, found.high) < margin:
        verdict = "the same"
    else:
        verdict = f"can't be told; {needed(found, margin)} {unit} like these would tell with a power of 80 %"
    positive = sum(value > 0 for value in found.values)
    return f"{shown(found)} (positive in {positive} of {found.n} {unit}): {verdict}"


def needed(found: SeedMean, margin: float) -> int:
    """How many seeds tell in four of five repetitions, if mean m and deviation s over seeds are as estimated: the least
    n with which the 95 % interval excludes 0, or lies within ± margin.

        |m| >= (t_{n-1, 0.975} + t_{n-1, 0.8}) s / sqrt(n)
        margin - |m| >= (t_{n-1, 0.975} + t_{n-1, 0.9}) s / sqrt(n)

    The second is stricter, as an interval can leave the margin on either side. A shifted t stands for the noncentral
    one. Without the second quantile the interval would end at 0 on average, and tell in half of the repetitions.
    """
    deviation = stdev(found.values)

    def tells(n: int) -> bool:
        error, width = deviation / math.sqrt(n), t_quantile(0.975, n - 1)
        apart = abs(found.mean) >= (width + t_quantile(0.8, n - 1)) * error
        return apart or margin - abs(found.mean) >= (width + t_quantile(0.9, n - 1)) * error

    return next(n for n in range(2, 100_000) if tells(n))


def at_look(found: SeedMean | None, look: int) -> SeedMean | None:
    """With an interval of 1 - .05 / look, 98.3 % at the third look at one prediction: as each of so many looks would
    need for one error in twenty of all. With 5 % of the first and 2.5 % of the second, three err in up to 9.2 %."""
    if found is None or found.half is None:
        return found
    wider = t_quantile(1 - 0.05 / look / 2, found.n - 1) / t_quantile(0.975, found.n - 1)
    return replace(found, half=found.half * wider)


def shown(found: SeedMean | None, digits: int = 3) -> str:
    if found is None:
        return "–"
    return f"{found.mean:.{digits}f}" + (f" ± {found.half:.{digits}f}" if found.half is not None else "")


def print_table(runs: Sequence[Run], cells: Sequence[str], columns: Mapping[str, tuple[Outcome, int]]) -> None:
    """A row for each cell, means over seeds with their intervals. columns: outcomes and their decimal digits."""
    print(f"\n| cell | {' | '.join(columns)} |\n" + "|---" * (1 + len(columns)) + "|")
    for cell in cells:
        means = [shown(cell_mean(runs, cell, outcome), digits) for outcome, digits in columns.values()]
        print(f"| `{cell}` | {' | '.join(means)} |")
    print()


def panel(runs: Sequence[Run], cells: Sequence[str], curve: str, steps: int, *, title: str, y: str) -> Panel:
    """A curve of each cell by step: means over seeds with their intervals."""
    lines = {}
    for cell in cells:
        if of_cell := [run for run in runs if run["cell"] == cell]:
            means = [mean_over_seeds([total(run, curve, step, step + 1) for run in of_cell]) for step in range(steps)]
            columns = [m.mean for m in means if m], [m.half or 0.0 for m in means if m]
            lines[cell] = (range(1, steps + 1), *columns)
    return Panel(title=title, x="step", y=y, lines=lines)


def run_claim(
    file: str, report: Callable[[Sequence[Run]], None], *sweeps: str, beside: Callable[[], None] | None = None
) -> None:
    """The command of a claim: run its sweeps, and what is `beside` them, or with `--table` only read its results, and
    report."""
    claim = Path(file).parent
    parser = argparse.ArgumentParser(prog=f"python -m evidence.{claim.name}", description="Run, or continue, a claim.")
    parser.add_argument("--table", action="store_true", help="run nothing: report the results that are here")
    if not parser.parse_args().table:
        sweep(claim, *sweeps)
        if beside is not None:
            beside()
    runs = read(claim)
    plans = [read_sweep(claim / f"{name}.yaml") for name in sweeps]
    planned, ended = sum(len(p.cells) * len(p.seeds) for p in plans), sum(run["status"] == "done" for run in runs)
    print(f"{len(runs)} of {planned} runs have ended, {len(runs) - ended} of them before their last step.")
    if len(runs) < planned:
        print("What follows is not the result: no verdict holds before all of them have.")
    report(runs)
