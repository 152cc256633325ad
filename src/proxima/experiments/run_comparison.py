"""Compares runs: those that differ only in the seed form a cell, and cells get means and intervals over their seeds.

comparison = compare_runs([read_run(folder) for folder in find_runs(["runs/trust_regions"])], target=0.9)
comparison.cells[0].band("reward/mean", "time")     x, mean, low, high: a curve with its interval
comparison.rows()                                   the final table
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from proxima.config.comparable import Purpose, compared, may_differ
from proxima.data import UserError
from proxima.data.errors import suggestion
from proxima.evaluation.headline import REWARD, Headline
from proxima.experiments.cell_statistics import (
    EPISODE_FIGURES,
    EXAMPLE_FIGURES,
    CellRuns,
    CellSummary,
    summarize,
    t_quantile,
)
from proxima.experiments.metric_names import canonical_metric
from proxima.experiments.run_reader import AXES, Run
from proxima.runtime.watch.observer import warning_kind
from proxima.system.jsonl import dumps

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class RunComparison:
    """Cells side by side.

    Args:
        baseline: the cell that the others are compared with.
        headline: the figure of the evaluations that is compared.
        target: the value of that figure whose cost is computed.
        axes: those that all cells recorded.
        figures: names of `EXAMPLE_FIGURES` that a cell has, if all runs are on fixed data sets; else those of
            `EPISODE_FIGURES`.
        offline: all runs are on fixed data sets.
        differing: dotted path → value in each cell, for fields that are not equal in all; None where a cell lacks it.
        warnings: why the comparison may be unfair.
        notes: runs and cells that are unfinished, left out, or based on two seeds.
    """

    cells: tuple[CellRuns, ...]
    baseline: CellRuns
    headline: Headline
    target: float | None
    axes: tuple[str, ...]
    figures: tuple[str, ...]
    offline: bool
    differing: Mapping[str, tuple[Any, ...]]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def rows(self) -> list[CellSummary]:
        """The final table."""
        return [summarize(cell, self.baseline, self.target, self.figures) for cell in self.cells]

    def as_json(self) -> dict[str, Any]:
        """All numbers of the final table, with the folders of the runs. An infinite ratio or cost is null."""
        pairs = zip(self.rows(), self.cells, strict=True)
        rows = [{**asdict(row), "folders": [str(run.folder) for run in cell.runs]} for row, cell in pairs]
        facts = {"baseline": self.baseline.name, "metric": self.headline.key, "target": self.target, "cells": rows}
        why = {"differing": self.differing, "warnings": self.warnings, "notes": self.notes}
        return dict(json.loads(dumps({**facts, **why})))


def compare_runs(
    runs: Sequence[Run], *, baseline: str | None = None, target: float | None = None, metric: str | None = None
) -> RunComparison:
    """Group runs into cells and find the fields in which these differ.

    Args:
        runs: at least one; the cells are in their order.
        baseline: name of the cell that the others are compared with; None takes the first.
        target: a value of the held-out figure; of an accuracy in (0, 1].
        metric: the held-out figure, by any of its names; None: `Headline.of` the evaluations of all runs.
    Raises: UserError without runs, for an unknown cell, or for an impossible target.
    """
    if not runs:
        raise UserError("no runs to compare; give run folders, or a sweep's folder")
    headline = Headline.of([r for run in runs for r in run.evals], canonical_metric(metric) if metric else None)
    if target is not None and not (0 < target <= 1 if headline.share else math.isfinite(target)):
        bound = "in (0, 1]" if headline.share else "that is finite"
        raise UserError(f"target={target} must be a held-out {headline.name} {bound}")
    cells = _cells([replace(run, headline=headline) for run in runs])
    names = [cell.name for cell in cells]
    if baseline is not None and baseline not in names:
        raise UserError(f"baseline={baseline} is not a cell", remedy=suggestion(baseline, names))
    differing = _differing([cell.config for cell in cells])
    return RunComparison(
        cells=cells,
        baseline=cells[names.index(baseline) if baseline else 0],
        headline=headline,
        target=target,
        axes=tuple(axis for axis in AXES if all(cell.has(axis) for cell in cells)),
        figures=_figures(cells, headline),
        offline=all(run.offline for cell in cells for run in cell.runs),
        differing=differing,
        warnings=tuple(_warnings(cells, list(differing), headline)),
        notes=tuple(_notes(cells, headline)),
    )


def _figures(cells: Sequence[CellRuns], headline: Headline) -> tuple[str, ...]:
    """Return the names of the additional figures. For runs on fixed data sets these replace the rewards, without the
    headline, which has its own columns; for other runs they are those of episodes."""
    if not all(run.offline for cell in cells for run in cell.runs):
        return tuple(name for name, measure in EPISODE_FIGURES.items() if any(c.over_seeds(measure) for c in cells))
    return tuple(
        name
        for name, measure in EXAMPLE_FIGURES.items()
        if name != f"held-out {headline.name}" and any(cell.over_seeds(measure) for cell in cells)
    )


def _differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return dotted path → value in each config, where not all are equal. A list that is empty in one config and has
    elements in another is compared by its elements only."""
    paths = dict.fromkeys(path for config in configs for path in config)
    values = {path: tuple(config.get(path) for config in configs) for path in paths}
    parents = {path.rpartition(".")[0] for path in paths}
    return {path: of for path, of in values.items() if path not in parents and any(value != of[0] for value in of)}


def _cells(runs: Sequence[Run]) -> tuple[CellRuns, ...]:
    groups: dict[str, list[Run]] = {}
    configs: dict[str, dict[str, Any]] = {}
    for run in runs:
        config = compared(run.config, Purpose.CELL)
        if config:
            key = json.dumps(config, sort_keys=True)
        else:
            key = str(run.folder)
        configs[key] = config
        groups.setdefault(key, []).append(run)
    names = zip(_names(list(groups.values()), list(configs.values())), groups, strict=True)
    return tuple(CellRuns(name=name, runs=tuple(groups[key]), config=configs[key]) for name, key in names)


def _names(groups: Sequence[Sequence[Run]], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each cell by the folder of the sweep's cell or of its single run; otherwise, and for equal names, by the
    differing values."""
    differing = list(_differing(configs))[:4]
    names = []
    for group, config in zip(groups, configs, strict=True):
        folders = [run.folder.resolve() for run in group]
        parents = {folder.parent for folder in folders}
        of_a_sweep = len(parents) == 1 and all(re.fullmatch(r"seed-\d+", folder.name) for folder in folders)
        if of_a_sweep:
            name = folders[0].parent.name
        elif len(group) == 1:
            name = folders[0].name
        else:
            name = ""
        values = (f"{p.removesuffix('.kind').rpartition('.')[2]}={config[p]}" for p in differing if p in config)
        names.append((name, ",".join(values), folders[0]))
    plain = [name for name, _, _ in names]
    long = [
        name if name and plain.count(name) == 1 else f"{name} {values}".strip() or folder.name
        for name, values, folder in names
    ]
    above = [folder.parent.name for _, _, folder in names]
    return [n if long.count(n) == 1 else f"{parent}/{n}" for parent, n in zip(above, long, strict=True)]


def _warnings(cells: Sequence[CellRuns], differing: Sequence[str], headline: Headline) -> list[str]:
    """Return each reason why the comparison is unfair, in one line."""
    texts = []
    rewards = [path for path in differing if path.startswith("reward")]
    if rewards and headline.key == REWARD:
        texts.append(f"the cells have different rewards ({', '.join(rewards)}): do not compare their mean rewards")
    tasks = [path for path in differing if path.startswith("task.")]
    if tasks:
        if all(run.offline for cell in cells for run in cell.runs):
            what = "training figures"
        else:
            what = "rewards"
        texts.append(f"the cells were trained on different tasks ({', '.join(tasks)}): do not compare their {what}")
    held_out = [path for path in differing if path.startswith("eval.") and not may_differ(path, Purpose.ACCURACY)]
    questions = {record.get("questions") for cell in cells for run in cell.runs for record in run.evals}
    if held_out or len(questions) > 1:
        why = ", ".join(held_out) or "numbers of questions: " + ", ".join(sorted(map(str, questions)))
        texts.append(f"the cells were evaluated on different questions ({why}): do not compare their held-out results")
    replays = [(str(cell.config["rollouts"]), cell.name) for cell in cells if cell.config.get("rollouts") is not None]
    for replayed, names in _grouped(replays).items():
        why = f"replays of {replayed}, whose policy earned the training rewards: {', '.join(names)}"
        texts.append(f"{why}; times are without generation; compare held-out results")
    steps = {cell.name: sorted({run.steps for run in cell.used if run.status == "done"}) for cell in cells}
    if len({number for numbers in steps.values() for number in numbers}) > 1:
        each = ", ".join(f"{name} {' and '.join(map(str, numbers))}" for name, numbers in steps.items() if numbers)
        texts.append(f"the runs have different numbers of steps ({each}): compare the curves at equal steps")
    machines = set()
    for facts in (run.environment for cell in cells for run in cell.used if run.environment):
        processor = (facts.get("machine") or {}).get("processor", "unknown")
        machines.add(f"{processor}, {(facts.get('torch') or {}).get('threads', '?')} threads")
    if len(machines) > 1:
        where = "; ".join(sorted(machines))
        texts.append(f"the runs used different machines or thread counts ({where}): compare steps, not times")
    repeated = [cell.name for cell in cells if len({run.seed for run in cell.runs}) < len(cell.runs)]
    if repeated:
        texts.append(
            f"a seed more than once ({', '.join(repeated)}): the interval treats repetitions as independent seeds"
        )
    return texts


def _notes(cells: Sequence[CellRuns], headline: Headline) -> list[str]:
    """Describe each missing run, seed or result in one line."""
    texts = []
    pairs = [cell.name for cell in cells if len(cell.used) == 2]
    if pairs:
        two, four = (t_quantile(0.975, n - 1) / math.sqrt(n) for n in (2, 4))
        wide = f"± {two:.1f} standard deviations, against ± {four:.1f} with 4 seeds"
        texts.append(f"2 seeds ({', '.join(pairs)}) are too few: their 95 % intervals are very wide, {wide}")
    if len(cells) > 1 and all(len(cell.runs) == 1 for cell in cells):
        texts.append("one seed per cell: no intervals, and a difference may be chance; run more seeds")
    for cell in cells:
        if len(cell.used) < len(cell.runs):
            effect = "left out of the means"
        else:
            effect = "included as far as it got"
        for run in cell.runs:
            if run.status != "done":
                if run.summary.get("error"):
                    error = f" ({run.summary['error']})"
                else:
                    error = ""
                steps = f"step {run.steps} of {run.config.get('train.steps') or '?'}"  # 0: whole epochs
                texts.append(f"{cell.name} seed {run.seed}: {run.status}{error} at {steps}; {effect}")
    unjudged = []
    for cell in cells:
        if any(run.status == "done" for run in cell.used) and not any(run.held_out() for run in cell.used):
            remedy = "set eval.task and eval.after"
            if any(run.evals for run in cell.used):
                remedy = "--metric reward compares the mean rewards"
                if cell.runs[0].offline:
                    remedy = "--metric NAME compares another of their figures"
            unjudged.append((remedy, cell.name))
    texts += [f"{', '.join(names)}: no held-out {headline.name}; {way}" for way, names in _grouped(unjudged).items()]
    return [*texts, *_warned_runs(cells)]


def _warned_runs(cells: Sequence[CellRuns]) -> list[str]:
    """Return the warnings of the runs, each kind once, with the runs that it concerns."""
    warned = [
        (warning_kind(warning["text"]), (warning["text"], cell.name, str(run.seed)))
        for cell in cells
        for run in cell.runs
        for warning in run.summary.get("warnings") or ()
    ]
    total = sum(len(cell.runs) for cell in cells)
    texts = []
    for places in _grouped(warned).values():
        seeds = _grouped([(name, seed) for _, name, seed in places])
        runs = ", ".join(f"{name} seed{'s' * (len(of) > 1)} {' and '.join(of)}" for name, of in seeds.items())
        if len(places) == total > 1:
            runs = "both runs" if total == 2 else f"all {total} runs"
        text, cell, seed = places[0]
        if len({text for text, *_ in places}) > 1:
            unlike = f" (figures of {cell} seed {seed})"
        else:
            unlike = ""
        texts.append(f"{runs}: {text}{unlike}; see report.html")
    return texts


def _grouped(pairs: Sequence[tuple[str, Item]]) -> dict[str, list[Item]]:
    """Group the second members of the pairs by the first, in order."""
    groups: dict[str, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups
