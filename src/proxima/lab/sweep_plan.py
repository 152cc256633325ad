"""What a sweep is to run: cells × seeds, each resolved, checked, and held against what lies in its folder already.

A run is a cell with a seed; its folder is `<folder>/<cell>/seed-<seed>`.
"""

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proxima.config.comparable import ABSENT, Purpose, differences
from proxima.config.errors import ConfigError, Problem
from proxima.config.read import shown_path
from proxima.config.resolve import Resolved, resolve
from proxima.config.scalars import in_one_line
from proxima.config.schema import RunConfig
from proxima.config.validate import check


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """One cell of a sweep.

    Args:
        name: of its folder; `algorithm=cppo,lr=1e-5`, the name under `cells`, or both.
        overrides: `key=value` texts over the recipe.
        written: dotted path → `FILE:LINE` of each of them.
    """

    name: str
    overrides: tuple[str, ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What a sweep file asks for.

    Args:
        jobs: runs side by side.
        cells: those to run; `every` are all that the file names.
        asked: the file as plain values.
    """

    file: Path
    recipe: Path
    folder: Path
    seeds: tuple[int, ...]
    jobs: int
    cells: tuple[SweepCell, ...]
    every: tuple[SweepCell, ...]
    asked: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A cell with a seed, checked.

    Args:
        overrides: the whole command line over the recipe, seed and folder and threads included.
        steps: of the run.
        threads: torch threads it will use, for OMP_NUM_THREADS; None leaves that alone.
        resolved: its config with provenance.
    """

    cell: str
    seed: int
    recipe: Path
    folder: Path
    overrides: tuple[str, ...]
    steps: int
    threads: int | None
    resolved: Resolved[RunConfig] = field(repr=False)

    @property
    def file(self) -> Path:
        """Where its resolved config is written before it begins: what it runs, whatever has become of the recipe by
        then."""
        return self.folder / "planned.yaml"

    @property
    def name(self) -> str:
        """`algorithm=cppo,lr=1e-5 seed 2`."""
        return f"{self.cell} seed {self.seed}"


def plan_runs(sweep: Sweep, *, cores: int | None = None) -> list[PlannedRun]:
    """Resolve and check every cell with every seed: all cells of the first seed, then those of the second.

    With several jobs each run gets `runtime.threads` = cores // jobs (or OMP_NUM_THREADS where that is set), unless a
    value was written.

    Args:
        cores: of the machine; None asks it.

    Raises:
        ConfigError: one line for each problem, with the cells that have it, and for each run already in the folder
            whose config is another.
    """
    share = _threads(sweep.jobs, cores)
    runs, found = [], _CellProblems([cell.name for cell in sweep.cells])
    for seed, cell in itertools.product(sweep.seeds, sweep.cells):
        try:
            run = _planned(sweep, cell, seed, share)
        except ConfigError as error:
            found.add(cell, error.problems)
            continue
        if problems := check(run.resolved):
            found.add(cell, problems)
        elif another := difference(run):
            found.alone.append(another)
        runs.append(run)
    if found:
        raise ConfigError(found.problems())
    return runs


def difference(run: PlannedRun) -> Problem | None:
    """What the config of the run that lies in the folder already has that this one has not; None where they agree, or
    none is there.

    Which fields may differ is said in `proxima.config.comparable`.
    """
    there = run.folder / "config.yaml"
    if not there.is_file():
        return None
    where, remedy = shown_path(run.folder), "take another folder (--folder), or delete that one to run it anew"
    try:
        before = _values(resolve(there))
    except ConfigError as error:
        return Problem(where, f"holds a run whose config this version can't read ({error.problems[0]}); {remedy}")
    for path, was, wanted in differences(before, _values(run.resolved), Purpose.RERUN):
        shown = ["absent" if value is ABSENT else in_one_line(value) for value in (was, wanted)]
        message = f"holds a run of another config: {path} is {shown[0]} there and {shown[1]} here"
        return Problem(where, f"{message}; put it back, {remedy}")
    return None


def _values(resolved: Resolved[RunConfig]) -> dict[str, Any]:
    return {entry.path: entry.value for entry in resolved.entries}


def _planned(sweep: Sweep, cell: SweepCell, seed: int, share: int | None) -> PlannedRun:
    folder = sweep.folder / cell.name / f"seed-{seed}"
    overrides = (*cell.overrides, f"seed={seed}", f"folder={json.dumps(str(folder), ensure_ascii=False)}")
    resolved = resolve(sweep.recipe, overrides)
    written = resolved.entry("runtime.threads").origin != "default"
    if share and not written:
        overrides = (*overrides, f"runtime.threads={share}")
        resolved = resolve(sweep.recipe, overrides)
    threads = resolved.config.runtime.threads or None
    steps = resolved.config.train.steps
    return PlannedRun(
        cell=cell.name,
        seed=seed,
        recipe=sweep.recipe,
        folder=folder,
        overrides=overrides,
        steps=steps,
        threads=threads,
        resolved=resolved,
    )


def _threads(jobs: int, cores: int | None) -> int | None:
    """Threads of each run where several go side by side; None leaves one alone with the machine."""
    if jobs == 1:
        return None
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // jobs)


class _CellProblems:
    """Problems with the cells that have them, so that what is wrong with the recipe is said once."""

    def __init__(self, cells: Sequence[str]) -> None:
        self.cells, self.alone = cells, list[Problem]()
        self._of: dict[Problem, list[str]] = {}

    def add(self, cell: SweepCell, problems: Iterable[Problem]) -> None:
        for problem in problems:
            cells = self._of.setdefault(_written_at(problem, cell), [])
            if cell.name not in cells:  # each seed finds it again
                cells.append(cell.name)

    def __bool__(self) -> bool:
        return bool(self._of or self.alone)

    def problems(self) -> list[Problem]:
        out = []
        for problem, cells in self._of.items():
            everywhere = len(cells) == len(self.cells) and len(cells) > 1
            where = "every cell" if everywhere else f"cell{'s' * (len(cells) > 1)} {' and '.join(cells)}"
            out.append(replace(problem, path=f"{where}: {problem.path}"))
        return out + self.alone


def _written_at(problem: Problem, cell: SweepCell) -> Problem:
    """`command line`, by which a cell's values reach the config, as the line of the sweep file."""
    if problem.source is None or "command line" not in problem.source:
        return problem
    parts = problem.path.split(".")
    for end in range(len(parts), 0, -1):
        path = ".".join(parts[:end])
        below = next((place for key, place in cell.written.items() if key == path or key.startswith(path + ".")), None)
        if below:
            return replace(problem, source=problem.source.replace("command line", below))
    return problem
