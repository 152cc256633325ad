"""Plans a sweep: cells × seeds, each resolved, validated, and compared with a run that is already in its folder.

A run is a cell with a seed; its folder is `<folder>/<cell>/seed-<seed>`.
"""

import itertools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from proxima.config.comparable import ABSENT, Purpose, differences, flat_values
from proxima.config.outcomes import settled_as
from proxima.config.problems import ConfigError, Problem
from proxima.config.resolution import resolve
from proxima.config.resolved import Resolved
from proxima.config.scalars import in_one_line
from proxima.config.tree import Node
from proxima.config.validate import check
from proxima.system.machine import usable_cores
from proxima.system.user_files import shown_path


@dataclass(frozen=True, kw_only=True)
class SweepCell:
    """One cell of a sweep."""

    name: str  # of its folder; `algorithm=cppo,lr=1e-5`, the name under `cells`, or both
    layer: Node | None = None  # its values over the recipe's, with their places in the file; None: the recipe itself
    overrides: tuple[str, ...] = ()  # the same as `key=value`, as a user would type them


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The contents of a sweep file: `cells` are those to run, `jobs` runs at a time, `settings` the file's values."""

    file: Path
    recipe: Path
    folder: Path
    seeds: tuple[int, ...]
    jobs: int
    cells: tuple[SweepCell, ...]
    all_cells: tuple[SweepCell, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A validated cell with a seed."""

    cell: str
    seed: int
    recipe: Path
    folder: Path
    overrides: tuple[str, ...]  # the whole command line over the recipe, with seed, folder and threads
    steps: int
    threads: int | None  # torch threads, for OMP_NUM_THREADS; None does not set it
    resolved: Resolved[Any] = field(repr=False)  # its config with provenance

    @property
    def file(self) -> Path:
        """The file of its resolved config, written before it starts; later edits of the recipe do not change it."""
        return self.folder / "planned.yaml"

    @property
    def name(self) -> str:
        """`algorithm=cppo,lr=1e-5 seed 2`."""
        return f"{self.cell} seed {self.seed}"


def plan_runs(sweep: Sweep, *, import_code: bool = True) -> list[PlannedRun]:
    """Resolve and validate every cell with every seed: all cells of the first seed, then those of the second.

    With several jobs each run gets `runtime.threads` = cores // jobs (or OMP_NUM_THREADS if set), unless the recipe or
    the sweep sets it. `import_code`: see `resolve`.

    Raises: ConfigError with a line for each problem, with its cells, and for each folder with a run of another config.
    """
    share = _threads(sweep.jobs)
    runs: list[PlannedRun] = []
    cells_of: dict[Problem, dict[str, None]] = {}  # each problem once, even if every seed has it
    conflicts: list[Problem] = []
    for seed, cell in itertools.product(sweep.seeds, sweep.cells):
        try:
            run = _planned(sweep, cell, seed, share, import_code)
            problems: Iterable[Problem] = check(run.resolved)
        except ConfigError as error:
            problems = error.problems
        else:
            runs.append(run)
            conflict = None if problems else folder_conflict(run)
            if conflict is not None:
                conflicts.append(conflict)
        for problem in problems:
            cells_of.setdefault(problem, {})[cell.name] = None
    if cells_of or conflicts:
        merged = [_of_cells(problem, list(cells), len(sweep.cells)) for problem, cells in cells_of.items()]
        raise ConfigError([*merged, *conflicts])
    return runs


def folder_conflict(run: PlannedRun) -> Problem | None:
    """Return the first field in which this config and that of the run in the folder differ but must not
    (`proxima.config.comparable`); None if they agree, or there is no run."""
    config = run.folder / "config.yaml"
    if not config.is_file():
        return None
    where = shown_path(run.folder)
    remedy = "use another --folder, or delete this one to start over"
    try:
        before = resolve(config, root=None, import_code=run.resolved.import_code).config
    except ConfigError as error:
        return Problem(where, f"holds a run whose config this version can't read ({error.problems[0]}); {remedy}")
    config_now = settled_as(run.resolved.config, before)
    for path, was, wanted in differences(flat_values(before), flat_values(config_now), Purpose.RERUN):
        there = "absent" if was is ABSENT else in_one_line(was)
        here = "absent" if wanted is ABSENT else in_one_line(wanted)
        message = f"holds a run of another config: {path} is {there} there and {here} here"
        return Problem(where, f"{message}; put it back, {remedy}")
    return None


def _planned(sweep: Sweep, cell: SweepCell, seed: int, share: int | None, import_code: bool) -> PlannedRun:
    folder = sweep.folder / cell.name / f"seed-{seed}"
    overrides = [f"seed={seed}", f"folder={json.dumps(str(folder), ensure_ascii=False)}"]
    resolved = resolve(sweep.recipe, overrides, layer=cell.layer, root=None, import_code=import_code)
    if share and resolved.entry("runtime.threads").origin == "default":
        overrides.append(f"runtime.threads={share}")
        resolved = resolve(sweep.recipe, overrides, layer=cell.layer, root=None, import_code=import_code)
    return PlannedRun(
        cell=cell.name,
        seed=seed,
        recipe=sweep.recipe,
        folder=folder,
        overrides=(*cell.overrides, *overrides),
        steps=resolved.config.train.steps,
        threads=resolved.config.runtime.threads or None,
        resolved=resolved,
    )


def _threads(jobs: int) -> int | None:
    """Threads of each of several simultaneous runs; None for a run that has the machine to itself."""
    if jobs == 1:
        return None
    setting = os.environ.get("OMP_NUM_THREADS", "")
    if setting.isdecimal() and int(setting) > 0:
        return int(setting)
    return max(1, usable_cores() // jobs)


def _of_cells(problem: Problem, cells: Sequence[str], of: int) -> Problem:
    """Return the problem with the cells that have it; a mistake in the recipe is attributed to every cell."""
    where = "every cell"
    if len(cells) < of or of == 1:
        noun = "cell" if len(cells) == 1 else "cells"
        where = f"{noun} {' and '.join(cells)}"
    return replace(problem, path=f"{where}: {problem.path}")
