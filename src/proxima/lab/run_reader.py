"""Reads a run from its folder: its config, its curves over any axis, its status. The run may be unfinished."""

import glob
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from proxima.config.problems import ConfigError, nearest
from proxima.config.recipe_reader import read_yaml, shown_path
from proxima.data import UserError
from proxima.evaluate.headline import Headline
from proxima.runtime.state.folder import RunFolder
from proxima.runtime.watch.metric_names import metric_of
from proxima.runtime.watch.observer import Record

# An axis → the key of metrics.jsonl whose running sum it is; steps count themselves.
AXES: dict[str, str | None] = {
    "step": None,
    "generated": "tokens/generated",
    "trained": "tokens/trained",
    "time": "time/step",
    "cpu": "time/cpu",
}

MOST_FOLDERS = 10_000  # that are searched for runs

Points = list[tuple[float, float]]


class NoMetrics(UserError):
    """The run has not recorded a step or an evaluation yet."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The records of metrics.jsonl.

    Args:
        train, evals: the records by kind; of several evaluations at a step the last.
        headline: the figure that stands for an evaluation.
    """

    train: tuple[Record, ...] = field(default=(), repr=False)
    evals: tuple[Record, ...] = field(default=(), repr=False)
    headline: Headline = field(default_factory=Headline)

    @classmethod
    def of(cls, records: Iterable[Record]) -> "Metrics":
        train = tuple(record for record in records if record.get("kind") == "train")
        last = {int(record["step"]): record for record in records if record.get("kind") == "eval"}
        evals = tuple(last[step] for step in sorted(last))
        return cls(train=train, evals=evals, headline=Headline.of(evals))

    def extended(self, records: Sequence[Record]) -> "Metrics":
        return Metrics.of((*self.train, *self.evals, *records))

    @property
    def steps(self) -> int:
        """Steps finished."""
        return int(self.train[-1]["step"]) if self.train else 0

    @property
    def offline(self) -> bool:
        """True of a run on a fixed data set: it has no rewards."""
        return any("examples" in r for r in (*self.train, *self.evals))

    def has(self, axis: str) -> bool:
        """True if every step recorded the axis's key."""
        key = AXES[axis]
        return key is None or all(r.get(key) is not None for r in self.train)

    def position(self, axis: str) -> dict[int, float]:
        """Step → position on the axis after it, starting with 0 at step 0.

        `time`, the training clock, sums `time/step`, which excludes evaluations and checkpoints; `cpu` sums `time/cpu`;
        `generated` and `trained` are tokens.
        """
        key = AXES[axis]
        steps = [int(r["step"]) for r in self.train]
        if key is None:
            return {0: 0.0, **{step: float(step) for step in steps}}
        sums = itertools.accumulate(float(r.get(key) or 0.0) for r in self.train)
        return {0: 0.0, **dict(zip(steps, sums, strict=True))}

    def curve(self, key: str, axis: str = "step") -> Points:
        """(position on the axis, value) of a metric of the training records, under any of its names, for the steps that
        have it."""
        at = self.position(axis)
        values = ((r, metric_of(r, key)) for r in self.train)
        return [(at[int(r["step"])], float(value)) for r, value in values if value is not None]

    def held_out(self, axis: str = "step") -> Points:
        """(position on the axis, `headline`) of the evaluations that have it."""
        at = self.position(axis)
        values = ((int(r["step"]), self.headline.value(r)) for r in self.evals)
        return [(at[step], value) for step, value in values if value is not None and step in at]

    def total(self, key: str) -> float | None:
        """The sum of a metric over the steps, under any of its names; None if no step has it."""
        values = [float(value) for r in self.train if (value := metric_of(r, key)) is not None]
        return sum(values) if values else None

    def rate(self, tokens: str, time: str) -> float | None:
        """Tokens per second over the whole run."""
        amount, spent = self.total(tokens), self.total(time)
        return amount / spent if amount is not None and spent else None

    def first_reach(self, target: float, axis: str = "step") -> float | None:
        """Position on the axis at which the held-out figure reaches `target`; None if it never does.

        Interpolated linearly between the first evaluation at or above the target (below it where lower is better) and
        the one before it; the position of the first evaluation if that reaches it already.
        """
        curve = self.held_out(axis)
        for i, (x, value) in enumerate(curve):
            if value <= target if self.headline.lower_is_better else value >= target:
                if i == 0:
                    return x
                x0, before = curve[i - 1]
                return x0 + (x - x0) * (target - before) / (value - before)
        return None


@dataclass(frozen=True, kw_only=True)
class Run(Metrics):
    """One run.

    Args:
        recipe: the content of config.yaml, `summary` and `environment` that of those files; empty if they are missing.
    """

    folder: Path
    recipe: Mapping[str, Any] = field(repr=False)
    summary: Record = field(repr=False)
    environment: Record = field(repr=False)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Dotted path → value of config.yaml."""
        return dict(flat(self.recipe))

    @property
    def files(self) -> RunFolder:
        return RunFolder(self.folder)

    @property
    def seed(self) -> int | None:
        """None if neither config nor summary has it."""
        seed = self.config.get("seed", self.summary.get("seed"))
        return seed if isinstance(seed, int) else None

    @property
    def status(self) -> str:
        """`done`, `stopped`, `failed`, or `unfinished`, without summary.json: running, or killed."""
        return str(self.summary.get("status", "unfinished"))


def existing_run(folder: str | Path) -> RunFolder:
    """The folder of a run; UserError if it holds none."""
    place = RunFolder(folder)
    if not place.has_run:
        where = "give the folder that `proxima train` printed in its first line"
        raise UserError(f"{shown_path(place.path)} is not a run", remedy=where)
    return place


def read_run(folder: str | Path, *, empty: bool = False) -> Run:
    """Read a run from its folder.

    Args:
        empty: also a run that has not recorded anything yet.
    Raises: NoMetrics if the run has no records; UserError if it is none, or a file in it is damaged.
    """
    place = existing_run(folder)
    metrics = Metrics.of(place.read_metrics())
    if not (metrics.train or metrics.evals or empty):
        raise NoMetrics(f"{shown_path(place.path)} has no metrics; it has not finished a step or an evaluation yet")
    return Run(
        folder=place.path,
        recipe=read_config(place.config),
        summary=read_mapping(place.summary),
        environment=read_mapping(place.environment),
        **vars(metrics),
    )


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """The run folders that are given, are below a given folder, or match a pattern; each once, in the given order.

    Raises: UserError if one of `places` leads to no run, or has too many folders below it to search.
    """
    folders: dict[Path, Path] = {}
    for place in places:
        matches = [Path(place)] if Path(place).exists() else sorted(map(Path, glob.glob(str(place), recursive=True)))
        count = itertools.count(1)
        runs = [run for match in matches for run in _below(match, match, count)]
        if not runs:
            raise no_runs(Path(place), bool(matches))
        for run in runs:
            folders.setdefault(run.resolve(), run)
    return list(folders.values())


def _below(place: Path, start: Path, count: Iterator[int]) -> Iterator[Path]:
    if place.is_file():
        return
    if RunFolder(place).has_run:
        yield place
        return
    if next(count) > MOST_FOLDERS:
        remedy = "give run folders, or a sweep's folder"
        raise UserError(f"{start} has more than {MOST_FOLDERS:,} folders below it", remedy=remedy)
    for listed in read_mapping(place / "sweep.json").get("runs", ()):  # in this order: the first cell is the baseline
        if RunFolder(place / listed["folder"]).has_run:
            yield place / listed["folder"]
    for child in sorted((child for child in place.iterdir() if child.is_dir()), key=lambda child: _natural(child.name)):
        yield from _below(child, start, count)


def _natural(name: str) -> list[tuple[int, str]]:
    """`seed-2` before `seed-10`."""
    parts = ["".join(group) for _, group in itertools.groupby(name, str.isdigit)]
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def no_runs(place: Path, exists: bool = False) -> UserError:
    """The error for a place that is no run, with the run beside it that was probably meant."""
    what = "give run folders, a sweep's folder, or a pattern in quotes"
    if exists:
        return UserError(f"{place} and the folders below contain no run", remedy=what)
    folders = [] if "*" in place.name else _folders_beside(place)
    near = nearest(place.name, [folder.name for folder in folders])
    if near is not None:
        what = f"did you mean {str(place.parent / near)!r}?"
    elif runs := [str(folder) for folder in sorted(folders) if _holds_runs(folder)]:
        what = f"known: {', '.join(runs)}"
    return UserError(f"{place} does not exist", remedy=what)


def runs_beside(place: Path) -> bool:
    """True if the folder of `place` holds runs or sweeps."""
    return any(map(_holds_runs, _folders_beside(place)))


def misspelt(place: Path) -> Path | None:
    """The existing path that `place` is where only the name of its folder is mistyped: `run/mine` of `runs/mine`."""
    near = nearest(place.parent.name, [folder.name for folder in _folders_beside(place.parent)])
    meant = place.parent.parent / str(near) / place.name
    return meant if near is not None and meant.exists() else None


def _folders_beside(place: Path) -> list[Path]:
    return [child for child in place.parent.iterdir() if child.is_dir()] if place.parent.is_dir() else []


def _holds_runs(place: Path) -> bool:
    try:
        return (place / "sweep.json").is_file() or RunFolder(place).has_run
    except OSError:  # a folder that can't be read
        return False


def read_config(path: Path) -> dict[str, Any]:
    """The values of a run's config.yaml; empty if it is missing, UserError if it is damaged."""
    return _content(path, lambda: read_yaml(path).to_python())


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a JSON file of a run; empty if it is missing, UserError if it is damaged."""
    return _content(path, lambda: json.loads(path.read_text(encoding="utf-8")))


def _content(path: Path, read: Callable[[], Any]) -> dict[str, Any]:
    try:
        value = read() if path.is_file() else {}
    except ConfigError as error:  # it names the file and the line
        raise UserError(str(error), remedy="restore the file, or delete it to go on without") from error
    except ValueError as error:
        remedy = "restore it, or delete it to go on without"
        raise UserError(f"{path} can't be read ({error})", remedy=remedy) from error
    return value if isinstance(value, dict) else {}


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of each leaf of nested mappings and lists of mappings."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from flat(item, f"{path}.{i}")
    elif path:
        yield path, value
