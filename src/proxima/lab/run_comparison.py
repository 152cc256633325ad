"""Runs held against each other: those that differ in the seed alone become one cell, a cell gets means and intervals
over its seeds.

comparison = compare_runs([read_run(folder) for folder in find_runs(["runs/trust_regions"])], target=0.9)
band = comparison.cells[0].band("reward/mean", "time")          x, mean, low, high: what to draw
comparison.rows()                                                what the final table says
"""

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from proxima.config.comparable import Purpose, compared, may_differ
from proxima.config.errors import suggestion
from proxima.data import UserError
from proxima.lab.run_reader import AXES, Run
from proxima.lab.seed_statistics import SeedMean, mean_over_seeds, smoothed, t_quantile

CLOCKS = ("step", "generated", "time", "cpu")


@dataclass(frozen=True)
class SeedBand:
    """A curve over seeds: at `x` the `mean`, and the 95 % interval where there is more than one seed (else `low` and
    `high` are empty)."""

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    n: int = 1


@dataclass(frozen=True, kw_only=True)
class CellRuns:
    """Runs of one config with different seeds.

    Args:
        name: the folder of the sweep's cell, or what sets it apart.
        runs: all of them; `used` are those that are done, or all where none is: the others are in no mean.
        config: of the runs, without what they may differ in.
    """

    name: str
    runs: tuple[Run, ...]
    config: Mapping[str, Any] = field(repr=False)

    @property
    def used(self) -> tuple[Run, ...]:
        done = tuple(run for run in self.runs if run.status == "done")
        return done or self.runs

    def has(self, axis: str) -> bool:
        """True when all its runs recorded the axis."""
        return all(run.has(axis) for run in self.used)

    def band(self, key: str, axis: str = "step") -> SeedBand | None:
        """A key of the training records (or `accuracy/held_out`) against an axis; None where no run has it, or not all
        have the axis.

        A point is a step that all runs have: its mean place on the axis and its mean value. Training curves are
            smoothed before they are
        averaged (`smoothed`).
        """
        if not self.has(axis):
            return None
        known = [(curve, run.position(axis)) for run in self.used if (curve := _by_step(run, key))]
        curves, places = [curve for curve, _ in known], [place for _, place in known]
        steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
        if not steps:
            return None
        points = [_sure([curve[step] for curve in curves]) for step in steps]
        several = len(curves) > 1
        return SeedBand(
            x=tuple(statistics.fmean(place[step] for place in places) for step in steps),
            mean=tuple(point.mean for point in points),
            low=tuple(point.low for point in points) if several else (),
            high=tuple(point.high for point in points) if several else (),
            n=len(curves),
        )

    def over_seeds(self, measure: Callable[[Run], float | None]) -> SeedMean | None:
        """Mean and interval of a number of each run."""
        return mean_over_seeds([measure(run) for run in self.used])


@dataclass(frozen=True)
class TargetCost:
    """Where a cell's runs reach the target on one axis.

    Args:
        values: of each used run, in order; None is never. A run that is not done and has not got there yet is left out:
            it still may.
        median: over them, never counted as infinitely late: None where that is what it comes to, or there is none.
        ratio: median over the seeds that both cells have of (baseline / this one): 2 is half the cost, inf is never for
            the baseline. A seed in which neither gets there has no ratio and may be on either side of the median: None
            where that depends on it, where the middle pair is half infinite, or without common seeds.
        pairs: common seeds. never: those of them in which neither cell gets there.
    """

    values: tuple[float | None, ...]
    median: float | None
    ratio: float | None
    pairs: int = 0
    never: int = 0

    @property
    def reached(self) -> int:
        return sum(value is not None for value in self.values)


@dataclass(frozen=True)
class CellSummary:
    """A line of the final table: estimates over the used runs of a cell.

    Args:
        before, after, best: held-out accuracy at step 0, at the last step, and the highest of each run.
        reward: of the last tenth of the steps. generate, train, clock, cpu: seconds over the whole run.
        generate_rate, train_rate: tokens a second.
        reach: axis → where the target is reached; empty without a target.
        difference: name of a measure → mean over common seeds of (this cell - baseline); empty for the baseline.
    """

    cell: str
    n: int
    runs: int
    before: SeedMean | None
    after: SeedMean | None
    best: SeedMean | None
    reward: SeedMean | None
    generate: SeedMean | None
    train: SeedMean | None
    clock: SeedMean | None
    cpu: SeedMean | None
    generate_rate: SeedMean | None
    train_rate: SeedMean | None
    reach: Mapping[str, TargetCost]
    difference: Mapping[str, SeedMean]


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Cells beside each other.

    Args:
        baseline: the cell that the others are held against.
        target: held-out accuracy whose cost is asked for.
        axes: those that all cells recorded.
        differing: dotted path → value in each cell, of what is not the same everywhere; None where a cell has no such
            field.
        warnings: why the comparison may not be fair. notes: what is not finished, was left out, or rests on two seeds.
    """

    cells: tuple[CellRuns, ...]
    baseline: CellRuns
    target: float | None
    axes: tuple[str, ...]
    differing: Mapping[str, tuple[Any, ...]]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def rows(self) -> list[CellSummary]:
        """The final table."""
        return [_row(cell, self.baseline, self.target) for cell in self.cells]

    def as_json(self) -> dict[str, Any]:
        """All numbers of the final table, with the runs behind them. A ratio or a cost that is infinite is null."""
        rows = [
            {**asdict(row), "folders": [str(run.folder) for run in cell.runs]}
            for row, cell in zip(self.rows(), self.cells, strict=True)
        ]
        found = {"baseline": self.baseline.name, "target": self.target, "cells": rows, "differing": self.differing}
        plain: dict[str, Any] = _finite({**found, "warnings": self.warnings, "notes": self.notes})
        return plain


def compare_runs(runs: Sequence[Run], *, baseline: str | None = None, target: float | None = None) -> RunComparison:
    """Group runs into cells and find what sets them apart.

    Args:
        runs: at least one; the order of the cells is theirs.
        baseline: name of the cell that the others are held against; None takes the first.
        target: a held-out accuracy in (0, 1].

    Raises:
        ValueError: no runs, no cell of that name, or a target outside (0, 1].
    """
    if not runs:
        raise UserError("no runs to compare; give run folders, or a sweep's folder")
    if target is not None and not 0 < target <= 1:
        raise UserError(f"target={target} must be a held-out accuracy in (0, 1]")
    cells = _cells(runs)
    names = [cell.name for cell in cells]
    if baseline is not None and baseline not in names:
        raise UserError(f"no cell {baseline!r} to be the baseline; {suggestion(baseline, names)}")
    paths = dict.fromkeys(path for cell in cells for path in cell.config)
    values = {path: tuple(cell.config.get(path) for cell in cells) for path in paths}
    values = {
        path: of for path, of in values.items() if not any(other.startswith(path + ".") for other in values)
    }  # `[]` beside a list
    return RunComparison(
        cells=cells,
        baseline=cells[names.index(baseline) if baseline else 0],
        target=target,
        axes=tuple(axis for axis in AXES if all(cell.has(axis) for cell in cells)),
        differing={path: found for path, found in values.items() if any(value != found[0] for value in found)},
        warnings=tuple(_warnings(cells, values)),
        notes=tuple(_notes(cells)),
    )


def _cells(runs: Sequence[Run]) -> tuple[CellRuns, ...]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        known = compared(run.config, Purpose.CELL)
        groups.setdefault(json.dumps(known, sort_keys=True) if known else str(run.folder), []).append(run)
    members = list(groups.values())
    configs = [compared(group[0].config, Purpose.CELL) for group in members]
    return tuple(
        CellRuns(name=name, runs=tuple(group), config=config)
        for name, group, config in zip(_names(members, configs), members, configs, strict=True)
    )


def _names(groups: Sequence[Sequence[Run]], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The folder of a sweep's cell or of a single run; where that can't be, or two are alike, the values that set the
    cell apart."""
    names = []
    for group in groups:
        above = {run.folder.resolve().parent for run in group}
        of_a_sweep = len(above) == 1 and all(re.fullmatch(r"seed-\d+", run.folder.resolve().name) for run in group)
        names.append(
            next(iter(above)).name if of_a_sweep else group[0].folder.resolve().name if len(group) == 1 else ""
        )
    paths = dict.fromkeys(path for config in configs for path in config)
    apart = [path for path in paths if any(config.get(path) != configs[0].get(path) for config in configs)]
    said = [
        ",".join(f"{path.removesuffix('.kind').rpartition('.')[2]}={c[path]}" for path in apart[:4] if path in c)
        for c in configs
    ]
    folders = [group[0].folder.resolve() for group in groups]
    names = [
        name if name and names.count(name) == 1 else f"{name} {values}".strip() or folder.name
        for name, values, folder in zip(names, said, folders, strict=True)
    ]
    return [n if names.count(n) == 1 else f"{folder.parent.name}/{n}" for n, folder in zip(names, folders, strict=True)]


def _warnings(cells: Sequence[CellRuns], values: Mapping[str, Sequence[Any]]) -> list[str]:
    """What makes a comparison unfair, a line each."""
    found = []
    differing = [path for path, of in values.items() if any(value != of[0] for value in of)]
    if tasks := [path for path in differing if path.startswith("task.")]:
        found.append(
            f"the cells were trained on different tasks ({', '.join(tasks)}): their rewards are of different questions"
        )
    held_out = [path for path in differing if path.startswith("eval.") and not may_differ(path, Purpose.ACCURACY)]
    questions = {record.get("questions") for cell in cells for run in cell.runs for record in run.evals}
    if held_out or len(questions) > 1:
        what = ", ".join(held_out) or "numbers of questions: " + ", ".join(sorted(str(q) for q in questions))
        found.append(
            f"the cells were evaluated on different questions ({what}): their accuracies can't be held against each "
            "other"
        )
    machines = {_machine(run) for cell in cells for run in cell.used if run.environment}
    if len(machines) > 1:
        found.append(
            f"the runs were made on different machines or thread counts ({'; '.join(sorted(machines))}): compare "
            "steps, not times"
        )
    for cell in cells:
        seeds = [run.seed for run in cell.runs]
        if len(set(seeds)) < len(seeds):
            found.append(f"{cell.name} has a seed more than once: its interval takes repetitions for independent seeds")
    return found


def _machine(run: Run) -> str:
    machine, torch = run.environment.get("machine") or {}, run.environment.get("torch") or {}
    return f"{machine.get('processor', 'unknown')}, {torch.get('threads', '?')} threads"


def _notes(cells: Sequence[CellRuns]) -> list[str]:
    """What is missing, a line a run or cell."""
    found = []
    if pairs := [cell.name for cell in cells if len(cell.used) == 2]:
        two, four = (t_quantile(0.975, n - 1) / math.sqrt(n) for n in (2, 4))
        text = (
            f"the 95 % intervals say next to nothing: ± {two:.1f} standard deviations, guessed from two values; "
            f"with 4 seeds ± {four:.1f}"
        )
        found.append(f"2 seeds ({', '.join(pairs)}): {text}")
    for cell in cells:
        left_out = len(cell.used) < len(cell.runs)
        for run in cell.runs:
            if run.status != "done":
                effect = "left out of the means" if left_out else "shown as far as it is"
                error = f" ({run.summary['error']})" if run.summary.get("error") else ""
                of = run.config.get("train.steps", "?")
                found.append(f"{cell.name} seed {run.seed}: {run.status}{error} at step {run.steps} of {of}; {effect}")
        if any(run.status == "done" for run in cell.used) and not any(run.accuracy() for run in cell.used):
            found.append(
                f"{cell.name}: no held-out accuracy was recorded; set eval.task, and a reward that knows what is right"
            )
    return found


MEASURES: dict[str, Callable[[Run], float | None]] = {
    "after": lambda run: _after(run),
    "best": lambda run: max((value for _, value in run.accuracy()), default=None),
    "reward": lambda run: _last_tenth(run, "reward/mean"),
    "clock": lambda run: run.total("time/step"),
    "cpu": lambda run: run.total("time/cpu") if run.has("cpu") else None,
}


def _row(cell: CellRuns, baseline: CellRuns, target: float | None) -> CellSummary:
    measured = {name: cell.over_seeds(measure) for name, measure in MEASURES.items()}
    reach = {axis: _reach(cell, baseline, target, axis) for axis in CLOCKS if target is not None and cell.has(axis)}
    return CellSummary(
        cell=cell.name,
        n=len(cell.used),
        runs=len(cell.runs),
        before=cell.over_seeds(lambda run: next((value for x, value in run.accuracy() if x == 0), None)),
        generate=cell.over_seeds(lambda run: run.total("time/generate")),
        train=cell.over_seeds(lambda run: run.total("time/train")),
        generate_rate=cell.over_seeds(lambda run: run.rate("tokens/generated", "time/generate")),
        train_rate=cell.over_seeds(lambda run: run.rate("tokens/trained", "time/train")),
        reach=reach,
        difference={}
        if cell is baseline
        else {n: d for n, m in MEASURES.items() if (d := paired(cell, baseline, m)) is not None},
        **measured,
    )


def paired(cell: CellRuns, baseline: CellRuns, measure: Callable[[Run], float | None]) -> SeedMean | None:
    """Mean and interval over common seeds of (cell - baseline); None without a common seed."""
    pairs = [(measure(run), measure(other)) for run, other in _pairs(cell, baseline)]
    return mean_over_seeds([mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None])


def _pairs(cell: CellRuns, baseline: CellRuns) -> list[tuple[Run, Run]]:
    """Runs of the same seed, both of them done: half a run against a whole one says nothing."""
    others = {run.seed: run for run in baseline.used if run.seed is not None and run.status == "done"}
    return [(run, others[run.seed]) for run in cell.used if run.seed in others and run.status == "done"]


def _reach(cell: CellRuns, baseline: CellRuns, target: float, axis: str) -> TargetCost:
    def cost(run: Run) -> float:
        found = run.first_reach(target, axis)
        return math.inf if found is None else found

    values = [value for run in cell.used if (value := cost(run)) < math.inf or run.status == "done"]
    median = statistics.median(values) if values else math.inf
    pairs = [(cost(run), cost(other)) for run, other in _pairs(cell, baseline)]
    ratios = [
        1.0 if mine == theirs else theirs / mine if mine else math.inf
        for mine, theirs in pairs
        if min(mine, theirs) < math.inf
    ]
    known = tuple(None if value == math.inf else value for value in values)
    return TargetCost(
        known,
        None if median == math.inf else median,
        _sure_median(ratios, len(pairs)),
        len(pairs),
        len(pairs) - len(ratios),
    )


def _sure_median(values: Sequence[float], n: int) -> float | None:
    """The median of `n` values of which these are known, whatever the others are, from 0 to infinity; None where it
    depends on them."""
    if not values:
        return None
    ends = []
    for other in (0.0, math.inf):
        ordered = sorted([*values, *[other] * (n - len(values))])
        ends += ordered[(n - 1) // 2 : n // 2 + 1]
    if len(set(ends)) == 1:
        return ends[0]
    return statistics.median(values) if len(values) == n and max(ends) < math.inf else None


def _after(run: Run) -> float | None:
    """Accuracy at the last step of the run; None where it was not evaluated there."""
    curve = run.accuracy()
    return curve[-1][1] if curve and curve[-1][0] == run.steps > 0 else None


def _last_tenth(run: Run, key: str) -> float | None:
    values = [value for _, value in run.curve(key)]
    last = values[-max(1, len(values) // 10) :]
    return statistics.fmean(last) if last else None


def _by_step(run: Run, key: str) -> dict[int, float]:
    """Step → value, smoothed where it is a training curve."""
    if key == "accuracy/held_out":
        return {int(x): value for x, value in run.accuracy()}
    curve = run.curve(key)
    values = smoothed([value for _, value in curve])
    return {int(x): value for (x, _), value in zip(curve, values, strict=True) if value is not None}


def _sure(values: Sequence[float]) -> SeedMean:
    found = mean_over_seeds(values)
    assert found is not None  # metrics.jsonl holds finite numbers only
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
