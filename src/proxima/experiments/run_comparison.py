"""Compares runs: those that differ only in the seed form a cell, and cells get means and intervals over their seeds.

comparison = compare_runs([read_run(folder) for folder in find_runs(["runs/trust_regions"])], target=0.9)
comparison.cells[0].band("reward/mean", "time")     x, mean, low, high: a curve with its interval
comparison.rows()                                   the final table
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
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
        rows: list[dict[str, Any]] = []
        for row, cell in zip(self.rows(), self.cells, strict=True):
            folders = [str(run.folder) for run in cell.runs]
            rows.append({**asdict(row), "folders": folders})
        facts = {
            "baseline": self.baseline.name,
            "metric": self.headline.key,
            "target": self.target,
            "cells": rows,
            "differing": self.differing,
            "warnings": self.warnings,
            "notes": self.notes,
        }
        return dict(json.loads(dumps(facts)))


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
    named = canonical_metric(metric) if metric else None
    headline = Headline.of(list(chain.from_iterable(run.evals for run in runs)), named)
    if target is not None:
        _check_target(target, headline)
    cells = _cells([replace(run, headline=headline) for run in runs])
    names = [cell.name for cell in cells]
    if baseline is not None and baseline not in names:
        raise UserError(f"baseline={baseline} is not a cell", remedy=suggestion(baseline, names))
    differing = _differing([cell.config for cell in cells])
    first = names.index(baseline) if baseline else 0
    return RunComparison(
        cells=cells,
        baseline=cells[first],
        headline=headline,
        target=target,
        axes=tuple(axis for axis in AXES if all(cell.has(axis) for cell in cells)),
        figures=_figures(cells, headline),
        offline=_all_offline(cells),
        differing=differing,
        warnings=tuple(_warnings(cells, list(differing), headline)),
        notes=tuple(_notes(cells, headline)),
    )


def _check_target(target: float, headline: Headline) -> None:
    """Raise UserError for a value that the held-out figure can't reach."""
    if headline.share and not 0 < target <= 1:
        raise UserError(f"target={target} must be a held-out {headline.name} in (0, 1]")
    if not math.isfinite(target):
        raise UserError(f"target={target} must be a held-out {headline.name} that is finite")


def _runs_of(cells: Sequence[CellRuns]) -> Iterator[Run]:
    for cell in cells:
        yield from cell.runs


def _all_offline(cells: Sequence[CellRuns]) -> bool:
    """True if all runs are on fixed data sets."""
    return all(run.offline for run in _runs_of(cells))


def _figures(cells: Sequence[CellRuns], headline: Headline) -> tuple[str, ...]:
    """Return the names of the additional figures. For runs on fixed data sets these replace the rewards, without the
    headline, which has its own columns; for other runs they are those of episodes."""
    measures = dict(EPISODE_FIGURES)
    if _all_offline(cells):
        measures = dict(EXAMPLE_FIGURES)
        measures.pop(f"held-out {headline.name}", None)
    return tuple(name for name, measure in measures.items() if any(cell.over_seeds(measure) for cell in cells))


def _differing(configs: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Return dotted path → value in each config, where not all are equal. A list that is empty in one config and has
    elements in another is compared by its elements only."""
    paths = dict.fromkeys(chain.from_iterable(configs))
    parents = {path.rpartition(".")[0] for path in paths}
    differing: dict[str, tuple[Any, ...]] = {}
    for path in paths:
        values = tuple(config.get(path) for config in configs)
        if path not in parents and any(value != values[0] for value in values):
            differing[path] = values
    return differing


def _cells(runs: Sequence[Run]) -> tuple[CellRuns, ...]:
    groups: dict[str, list[Run]] = {}
    configs: dict[str, dict[str, Any]] = {}
    for run in runs:
        config = compared(run.config, Purpose.CELL)
        key = json.dumps(config, sort_keys=True) if config else str(run.folder)
        configs[key] = config
        groups.setdefault(key, []).append(run)
    names = _names(list(groups.values()), list(configs.values()))
    cells: list[CellRuns] = []
    for name, key in zip(names, groups, strict=True):
        cells.append(CellRuns(name=name, runs=tuple(groups[key]), config=configs[key]))
    return tuple(cells)


def _names(groups: Sequence[Sequence[Run]], configs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each cell by the folder of the sweep's cell or of its single run; otherwise, and for equal names, by the
    differing values."""
    differing = list(_differing(configs))[:4]
    first_folders = [group[0].folder.resolve() for group in groups]
    plain = [_name_by_folder(group) for group in groups]
    names: list[str] = []
    for name, config, folder in zip(plain, configs, first_folders, strict=True):
        if not name or plain.count(name) > 1:
            name = f"{name} {_values_in_name(config, differing)}".strip() or folder.name
        names.append(name)
    unique: list[str] = []
    for name, folder in zip(names, first_folders, strict=True):
        if names.count(name) > 1:
            name = f"{folder.parent.name}/{name}"
        unique.append(name)
    return unique


def _name_by_folder(group: Sequence[Run]) -> str:
    """The folder of the sweep's cell, or of the single run; empty if there is none."""
    folders = [run.folder.resolve() for run in group]
    parents = {folder.parent for folder in folders}
    if len(parents) == 1 and all(re.fullmatch(r"seed-\d+", folder.name) for folder in folders):
        return folders[0].parent.name
    if len(group) == 1:
        return folders[0].name
    return ""


def _values_in_name(config: Mapping[str, Any], paths: Sequence[str]) -> str:
    """`lr=1e-5,surrogate=cppo`: the values of those of the fields that the config has."""
    texts: list[str] = []
    for path in paths:
        if path in config:
            field = path.removesuffix(".kind").rpartition(".")[2]
            texts.append(f"{field}={config[path]}")
    return ",".join(texts)


def _warnings(cells: Sequence[CellRuns], differing: Sequence[str], headline: Headline) -> list[str]:
    """Return each reason why the comparison is unfair, in one line."""
    texts: list[str] = []
    rewards = [path for path in differing if path.startswith("reward")]
    if rewards and headline.key == REWARD:
        texts.append(f"the cells have different rewards ({', '.join(rewards)}): do not compare their mean rewards")
    tasks = [path for path in differing if path.startswith("task.")]
    if tasks:
        what = "training figures" if _all_offline(cells) else "rewards"
        texts.append(f"the cells were trained on different tasks ({', '.join(tasks)}): do not compare their {what}")
    held_out = [path for path in differing if path.startswith("eval.") and not may_differ(path, Purpose.ACCURACY)]
    questions = {record.get("questions") for run in _runs_of(cells) for record in run.evals}
    if held_out or len(questions) > 1:
        why = ", ".join(held_out) or "numbers of questions: " + ", ".join(sorted(map(str, questions)))
        texts.append(f"the cells were evaluated on different questions ({why}): do not compare their held-out results")
    replays = [(str(cell.config["rollouts"]), cell.name) for cell in cells if cell.config.get("rollouts") is not None]
    for replayed, names in _grouped(replays).items():
        why = f"replays of {replayed}, whose policy earned the training rewards: {', '.join(names)}"
        texts.append(f"{why}; times are without generation; compare held-out results")
    steps = {cell.name: sorted({run.steps for run in cell.used if run.status == "done"}) for cell in cells}
    if len(set(chain.from_iterable(steps.values()))) > 1:
        each = ", ".join(f"{name} {' and '.join(map(str, numbers))}" for name, numbers in steps.items() if numbers)
        texts.append(f"the runs have different numbers of steps ({each}): compare the curves at equal steps")
    machines: set[str] = set()
    for run in chain.from_iterable(cell.used for cell in cells):
        if run.environment:
            processor = (run.environment.get("machine") or {}).get("processor", "unknown")
            threads = (run.environment.get("torch") or {}).get("threads", "?")
            machines.add(f"{processor}, {threads} threads")
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
        two = t_quantile(0.975, 1) / math.sqrt(2)
        four = t_quantile(0.975, 3) / math.sqrt(4)
        wide = f"± {two:.1f} standard deviations, against ± {four:.1f} with 4 seeds"
        texts.append(f"2 seeds ({', '.join(pairs)}) are too few: their 95 % intervals are very wide, {wide}")
    if len(cells) > 1 and all(len(cell.runs) == 1 for cell in cells):
        texts.append("one seed per cell: no intervals, and a difference may be chance; run more seeds")
    for cell in cells:
        some_finished = len(cell.used) < len(cell.runs)
        effect = "left out of the means" if some_finished else "included as far as it got"
        for run in cell.runs:
            if run.status == "done":
                continue
            status = run.status
            if run.summary.get("error"):
                status += f" ({run.summary['error']})"
            steps = f"step {run.steps} of {run.config.get('train.steps') or '?'}"  # 0: whole epochs
            texts.append(f"{cell.name} seed {run.seed}: {status} at {steps}; {effect}")
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
    warned: list[tuple[str, tuple[str, str, str]]] = []
    for cell in cells:
        for run in cell.runs:
            for warning in run.summary.get("warnings") or ():
                text = warning["text"]
                warned.append((warning_kind(text), (text, cell.name, str(run.seed))))
    total = sum(len(cell.runs) for cell in cells)
    texts: list[str] = []
    for places in _grouped(warned).values():
        seeds = _grouped([(name, seed) for _, name, seed in places])
        if len(places) == total > 1:
            runs = "both runs" if total == 2 else f"all {total} runs"
        else:
            runs = ", ".join(_seeds_in_words(name, of_cell) for name, of_cell in seeds.items())
        text, name, seed = places[0]
        if len({text for text, _, _ in places}) > 1:
            text += f" (figures of {name} seed {seed})"
        texts.append(f"{runs}: {text}; see report.html")
    return texts


def _seeds_in_words(cell: str, seeds: Sequence[str]) -> str:
    """`grpo seed 1`, `grpo seeds 1 and 2`."""
    noun = "seed" if len(seeds) == 1 else "seeds"
    return f"{cell} {noun} {' and '.join(seeds)}"


def _grouped(pairs: Sequence[tuple[str, Item]]) -> dict[str, list[Item]]:
    """Group the second members of the pairs by the first, in order."""
    groups: dict[str, list[Item]] = {}
    for key, item in pairs:
        groups.setdefault(key, []).append(item)
    return groups
