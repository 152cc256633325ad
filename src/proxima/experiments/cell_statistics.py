"""Statistics of a cell (runs of one config with different seeds): curves, summary, cost of a target; means over two to
five seeds with Student's intervals, medians, running means. Pure."""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from proxima.experiments.run_reader import Run

Measure = Callable[[Run], float | None]
HELD_OUT = "held_out"  # in place of a key of the training records: the headline of the evaluations
CLOCKS = ("step", "generated", "time", "cpu")  # axes on which a target has a cost


@dataclass(frozen=True)
class SeedMean:
    """A mean over `n` seeds, and the values in their order; `half` is half the 95 % interval, `t_{n-1} s / sqrt(n)`,
    None for a single value."""

    mean: float
    half: float | None
    n: int
    values: tuple[float, ...] = field(default=(), compare=False)

    @property
    def low(self) -> float:
        return self.mean - (self.half or 0.0)

    @property
    def high(self) -> float:
        return self.mean + (self.half or 0.0)


@dataclass(frozen=True)
class SeedBand:
    """A curve over seeds: at `x` the `mean` and its 95 % interval.

    `low` and `high` are empty for a single seed. Of two seeds they are the two values: their interval, ± 9 standard
    deviations, would hide every curve.
    """

    x: tuple[float, ...]
    mean: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    n: int = 1


@dataclass(frozen=True, kw_only=True)
class CellRuns:
    """Runs of one config with different seeds."""

    name: str  # the folder of the sweep's cell, or the values that distinguish it
    runs: tuple[Run, ...]
    config: Mapping[str, Any] = field(repr=False)  # without the fields that may differ within a cell

    @property
    def used(self) -> tuple[Run, ...]:
        """The finished runs, or all if none has finished."""
        done = tuple(run for run in self.runs if run.status == "done")
        return done or self.runs

    def has(self, axis: str) -> bool:
        """True if all its runs recorded the axis."""
        return all(run.has(axis) for run in self.used)

    def band(self, key: str, axis: str = "step") -> SeedBand | None:
        """A key of the training records (or `HELD_OUT`) over an axis; None if no run has the key, or not all
        have the axis.

        A point is a step that all runs have: its mean position on the axis and its mean value. Training curves are
        smoothed before they are averaged (`smoothed`).
        """
        if not self.has(axis):
            return None
        curves: list[dict[int, float]] = []
        positions: list[dict[int, float]] = []
        for run in self.used:
            curve = _by_step(run, key)
            if curve:
                curves.append(curve)
                positions.append(run.position(axis))
        if not curves:
            return None
        steps = sorted(set.intersection(*map(set, curves)))
        of_steps = [mean_over_seeds([curve[step] for curve in curves]) for step in steps]
        means = [mean for mean in of_steps if mean is not None]
        if not means:
            return None
        edges = [_drawn_interval(mean) for mean in means if mean.n > 1]
        return SeedBand(
            x=tuple(statistics.fmean(position[step] for position in positions) for step in steps),
            mean=tuple(mean.mean for mean in means),
            low=tuple(low for low, _ in edges),
            high=tuple(high for _, high in edges),
            n=len(curves),
        )

    def over_seeds(self, measure: Measure) -> SeedMean | None:
        """Return mean and interval over the runs of a measure."""
        return mean_over_seeds([measure(run) for run in self.used])


@dataclass(frozen=True)
class TargetCost:
    """The positions on an axis at which a cell's runs reach the target; unfinished runs that have not are left out.

    `ratio` is the median over common seeds of (baseline / this cell): 2 means half the cost, inf that the baseline
    never reaches it. If neither cell does, or one has reached it before the first step, the ratio of the seed is
    unknown; `ratio` is None if the median depends on it.
    """

    values: tuple[float | None, ...]  # of each used run, in order; None means never
    median: float | None  # of `values`, never counting as infinite; None if it is infinite or there is no value
    ratio: float | None
    pairs: int = 0  # common seeds
    never: int = 0  # common seeds with which neither cell reaches it

    @property
    def reached(self) -> int:
        return sum(value is not None for value in self.values)


@dataclass(frozen=True)
class CellSummary:
    """A row of the final table: means over the used runs of a cell. `generate`, `train`, `clock` and `cpu` are seconds
    over the whole run, the rates tokens per second."""

    cell: str
    n: int  # used runs
    runs: int  # all runs
    before: SeedMean | None  # the held-out figure at step 0
    after: SeedMean | None  # at the last step
    best: SeedMean | None  # of each run
    reward: SeedMean | None  # of the last tenth of the steps
    generate: SeedMean | None
    train: SeedMean | None
    clock: SeedMean | None
    cpu: SeedMean | None
    generate_rate: SeedMean | None
    train_rate: SeedMean | None
    reach: Mapping[str, TargetCost]  # axis → cost of the target; empty without a target
    difference: Mapping[str, SeedMean]  # measure → mean over common seeds of (this cell - baseline); empty for that
    figures: Mapping[str, SeedMean | None]  # those of `EXAMPLE_FIGURES`, or of `EPISODE_FIGURES`, that are shown


def after_training(run: Run) -> float | None:
    """The held-out figure at the last step of the run; None if it was not evaluated there."""
    curve = run.held_out()
    if curve and curve[-1][0] == run.steps > 0:
        return curve[-1][1]
    return None


def final_value(metric: str) -> Measure:
    """The mean of a metric of the training records, under any of its names, over the last tenth of the steps."""

    def measure(run: Run) -> float | None:
        values = [value for _, value in run.curve(metric)]
        if values:
            return statistics.fmean(values[-max(1, len(values) // 10) :])
        return None

    return measure


def last_evaluated(key: str) -> Measure:
    """A metric of the evaluation at the last step of the run."""

    def measure(run: Run) -> float | None:
        if not run.evals or run.steps == 0 or run.evals[-1]["step"] != run.steps:
            return None
        value: float | None = run.evals[-1].get(key)
        return value

    return measure


def _training_accuracy(run: Run) -> float | None:
    accuracy = final_value("accuracy")(run)
    if accuracy is None:
        return final_value("rewards/accuracies")(run)
    return accuracy


def _best(run: Run) -> float | None:
    values = [value for _, value in run.held_out()]
    if not values:
        return None
    return min(values) if run.headline.lower_is_better else max(values)


def _cpu_seconds(run: Run) -> float | None:
    if not run.has("cpu"):
        return None
    return run.total("time/cpu")


EXAMPLE_FIGURES: dict[str, Measure] = {  # of runs on a fixed data set, which have no reward
    "training loss": final_value("loss"),
    "training accuracy": _training_accuracy,
    "training margin": final_value("rewards/margins"),
    "held-out loss": last_evaluated("loss"),
    "held-out accuracy": last_evaluated("accuracy"),
    "held-out margin": last_evaluated("rewards/margins"),
}
EPISODE_FIGURES: dict[str, Measure] = {  # of runs with an environment or tools
    "turns": final_value("episode/turns/mean"),
    "calls": final_value("episode/calls"),
    "failed": final_value("episode/failed"),
}
COMPARED: dict[str, Measure] = {  # these are also compared seed by seed
    "after": after_training,
    "best": _best,
    "reward": final_value("reward/mean"),
    "clock": lambda run: run.total("time/step"),
    "cpu": _cpu_seconds,
}
MEASURES: dict[str, Measure] = COMPARED | {
    "before": lambda run: dict(run.held_out()).get(0.0),
    "generate": lambda run: run.total("time/generate"),
    "train": lambda run: run.total("time/train"),
    "generate_rate": lambda run: run.tokens_per_second["generate"],
    "train_rate": lambda run: run.tokens_per_second["train"],
}


def summarize(cell: CellRuns, baseline: CellRuns, target: float | None, figures: Sequence[str] = ()) -> CellSummary:
    """Return the row of a cell in the final table, with the additional `figures`."""
    axes = [axis for axis in CLOCKS if target is not None and cell.has(axis)]
    shown = {name: (EXAMPLE_FIGURES | EPISODE_FIGURES)[name] for name in figures}
    difference: dict[str, SeedMean] = {}
    if cell is not baseline:
        for name, measure in (COMPARED | shown).items():
            mean = paired(cell, baseline, measure)
            if mean is not None:
                difference[name] = mean
    return CellSummary(
        cell=cell.name,
        n=len(cell.used),
        runs=len(cell.runs),
        reach={axis: target_cost(cell, baseline, target or 0.0, axis) for axis in axes},
        difference=difference,
        figures={name: cell.over_seeds(measure) for name, measure in shown.items()},
        **{name: cell.over_seeds(measure) for name, measure in MEASURES.items()},
    )


def paired(cell: CellRuns, baseline: CellRuns, measure: Measure) -> SeedMean | None:
    """Mean and interval over common seeds of (cell - baseline); None without a common seed."""
    values = [(measure(run), measure(other)) for run, other in seed_pairs(cell, baseline)]
    return mean_over_seeds([a - b for a, b in values if a is not None and b is not None])


def seed_pairs(cell: CellRuns, baseline: CellRuns) -> list[tuple[Run, Run]]:
    """Finished runs of the same seed."""
    others = {run.seed: run for run in baseline.used if run.seed is not None and run.status == "done"}
    return [(run, others[run.seed]) for run in cell.used if run.seed in others and run.status == "done"]


def target_cost(cell: CellRuns, baseline: CellRuns, target: float, axis: str) -> TargetCost:
    """Return the cost on an axis at which the held-out figure of the cell's runs reaches `target`."""

    def cost(run: Run) -> float:
        reached = first_reach(run, target, axis)
        return math.inf if reached is None else reached

    costs = [cost(run) for run in cell.used]
    values = [value for run, value in zip(cell.used, costs, strict=True) if value < math.inf or run.status == "done"]
    median = statistics.median(values) if values else math.inf
    pairs = [(cost(run), cost(other)) for run, other in seed_pairs(cell, baseline)]
    ratios = [b / a for a, b in pairs if 0 < min(a, b) < math.inf]
    return TargetCost(
        values=tuple(map(_if_finite, values)),
        median=_if_finite(median),
        ratio=determined_median(ratios, len(pairs)),
        pairs=len(pairs),
        never=sum(min(pair) == math.inf for pair in pairs),
    )


def _if_finite(cost: float) -> float | None:
    if cost == math.inf:
        return None
    return cost


def first_reach(run: Run, target: float, axis: str = "step") -> float | None:
    """Position on the axis at which the held-out figure reaches `target`; None if it never does.

    Interpolated linearly between the first evaluation at or above the target (below it where lower is better) and the
    one before it; the position of the first evaluation if that reaches it already.
    """
    curve = run.held_out(axis)
    for i, (x, value) in enumerate(curve):
        reached = value <= target if run.headline.lower_is_better else value >= target
        if not reached:
            continue
        if i == 0:
            return x
        x0, before = curve[i - 1]
        return x0 + (x - x0) * (target - before) / (value - before)
    return None


def _drawn_interval(mean: SeedMean) -> tuple[float, float]:
    """The ends of an interval as a `SeedBand` has them: of two seeds they are the two values."""
    if mean.n == 2:
        return min(mean.values), max(mean.values)
    return mean.low, mean.high


def _by_step(run: Run, key: str) -> dict[int, float]:
    """Step → value; training curves are smoothed."""
    if key == HELD_OUT:
        return {int(x): value for x, value in run.held_out()}
    curve = run.curve(key)
    values = smoothed([value for _, value in curve])
    return {int(x): value for (x, _), value in zip(curve, values, strict=True)}


def mean_over_seeds(values: Sequence[float | None]) -> SeedMean | None:
    """Mean and 95 % t interval of the finite values; None without any.

    half = t_{n-1, 0.975} s / sqrt(n)        s with n - 1 in its denominator
    """
    finite = tuple(value for value in values if value is not None and math.isfinite(value))
    n = len(finite)
    if n < 2:
        if finite:
            return SeedMean(finite[0], None, 1, finite)
        return None
    half = t_quantile(0.975, n - 1) * (statistics.stdev(finite) / math.sqrt(n))
    return SeedMean(statistics.fmean(finite), half, n, finite)


@lru_cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return the quantile of Student's t with `freedom` degrees of freedom at `probability` in (0.5, 1); found by
    bisection, to 1e-12.

    Source: Abramowitz & Stegun 26.7.3 and 26.7.4, the finite series for whole degrees of freedom.
    """
    inside = 2 * probability - 1
    low = 0.0
    high = 1.0
    while _central(high, freedom) < inside:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if _central(middle, freedom) < inside:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _central(t: float, freedom: int) -> float:
    """Return the probability that |T| < t."""
    angle = math.atan(t / math.sqrt(freedom))
    sine = math.sin(angle)
    cosine = math.cos(angle)
    odd = freedom % 2 == 1
    if freedom == 1:
        return 2 * angle / math.pi
    term = cosine if odd else 1.0
    first = 3 if odd else 2
    total = term
    for k in range(first, freedom - 1, 2):  # odd: 2/3, 4/5 …; even: 1/2, 3/4 …
        term *= (k - 1) / k * cosine * cosine
        total += term
    if odd:
        return 2 / math.pi * (angle + sine * total)
    return sine * total


def determined_median(values: Sequence[float], n: int) -> float | None:
    """Return the median of `n` values of which only `values` are known; None if it depends on the others, which may be
    anything from 0 to infinity."""
    if not values:
        return None
    middle: set[float] = set()
    for other in (0.0, math.inf):
        unknown = [other] * (n - len(values))
        ordered = sorted([*values, *unknown])
        middle.update(ordered[(n - 1) // 2 : n // 2 + 1])
    if len(middle) == 1:
        return middle.pop()
    if len(values) == n and max(middle) < math.inf:
        return statistics.median(values)
    return None


def smoothed(values: Sequence[float]) -> list[float]:
    """Return the running mean over a tenth of the values around each, at least three, fewer at both ends; fewer than 12
    values unchanged."""
    if len(values) < 12:
        return list(values)
    half = max(1, len(values) // 20)
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    return [statistics.fmean(window) for window in windows]
