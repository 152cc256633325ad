"""Finds the folders of runs, and reads a run from its folder: its config, its curves over any axis, its status. The run
may be unfinished."""

import glob
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from proxima.config.problems import ConfigError
from proxima.config.recipe_reader import read_yaml
from proxima.data import UserError
from proxima.data.errors import nearest, safe_repr
from proxima.data.json_reader import load_json
from proxima.evaluation.headline import Headline
from proxima.experiments.metric_names import canonical_metric
from proxima.runtime.state.folder import RunFolder, existing_run
from proxima.runtime.state.summary import Summary, tokens_per_second
from proxima.runtime.watch.observer import Record
from proxima.system.damage import reading
from proxima.system.user_files import shown_path

# An axis → the key of metrics.jsonl whose running sum it is; None for `step`, which is the step number itself.
AXES: dict[str, str | None] = {
    "step": None,
    "generated": "tokens/generated",
    "trained": "tokens/trained",
    "time": "time/step",
    "cpu": "time/cpu",
}

Points = list[tuple[float, float]]


class NoMetrics(UserError):
    """The run has not recorded a step or an evaluation yet."""


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The records of metrics.jsonl.

    Args:
        train, evals: the records by kind; of several evaluations at a step the last.
        headline: the figure that represents an evaluation.
    """

    train: tuple[Record, ...] = field(default=(), repr=False)
    evals: tuple[Record, ...] = field(default=(), repr=False)
    headline: Headline = field(default_factory=Headline)

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Metrics":
        train = tuple(record for record in records if record.get("kind") == "train")
        last = {int(record["step"]): record for record in records if record.get("kind") == "eval"}
        evals = tuple(last[step] for step in sorted(last))
        return cls(train=train, evals=evals, headline=Headline.of(evals))

    @property
    def steps(self) -> int:
        """Steps finished."""
        if not self.train:
            return 0
        return int(self.train[-1]["step"])

    @property
    def offline(self) -> bool:
        """True for a run on a fixed data set, which has no rewards."""
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
        at = {0: 0.0}
        reached = 0.0
        for record in self.train:
            step = int(record["step"])
            if key is None:
                reached = float(step)
            else:
                reached += float(record.get(key) or 0.0)
            at[step] = reached
        return at

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
        values = [metric_of(record, key) for record in self.train]
        known = [float(value) for value in values if value is not None]
        if not known:
            return None
        return sum(known)

    @property
    def tokens_per_second(self) -> dict[str, float | None]:
        """Of generation and training over the whole run, as in the summary."""
        return tokens_per_second(self.train)


@dataclass(frozen=True, kw_only=True)
class Run(Metrics):
    """One run.

    Args:
        recipe: the content of config.yaml; `summary` and `environment`: of summary.json and environment.json. All are
            empty if the file is missing.
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
        if isinstance(seed, int):
            return seed
        return None

    @property
    def status(self) -> str:
        """`done`, `stopped`, `failed`, or `unfinished`, without summary.json: running, or killed."""
        return str(self.summary.get("status", "unfinished"))


def metric_of(record: Record, name: str) -> Any:
    """The value of a metric in a record of metrics.jsonl, under any of its names; None where it is missing."""
    if name in record:
        return record[name]

    return record.get(canonical_metric(name))


def read_run(folder: str | Path, *, empty: bool = False) -> Run:
    """Read a run from its folder.

    Args:
        empty: also a run that has not recorded anything yet.
    Raises: NoMetrics if the run has no records; UserError if the folder is not a run, or a file in it is damaged.
    """
    place = existing_run(folder)
    records = place.read_metrics()
    metrics = Metrics.of(records)
    if not (metrics.train or metrics.evals or empty):
        raise NoMetrics(f"{shown_path(place.path)} has no metrics; it has not finished a step or an evaluation yet")
    return Run(
        folder=place.path,
        recipe=read_config(place.config),
        summary=read_whole_summary(place),
        environment=read_mapping(place.environment),
        **vars(metrics),
    )


def read_config(path: Path) -> dict[str, Any]:
    """The values of a run's config.yaml; empty if it is missing, UserError if it is damaged."""
    return _content(path, lambda: read_yaml(path).to_python())


def read_mapping(path: Path) -> dict[str, Any]:
    """The content of a JSON file of a run; empty if it is missing, UserError if it is damaged."""
    return _content(path, lambda: load_json(path.read_text(encoding="utf-8")))


def read_whole_summary(files: RunFolder) -> dict[str, Any]:
    """The content of summary.json; empty while the run continues, UserError if it is damaged."""
    values = read_mapping(files.summary)
    for name, hint in get_type_hints(Summary).items():
        if name in values and not has_type(values[name], hint):
            reason = f"{files.summary} has {safe_repr(values[name]):.80} for {name}"
            raise UserError(reason, remedy="restore it, or delete it to continue without it")
    return values


def has_type(value: Any, hint: Any) -> bool:
    """True if a value of JSON is one of a type: a number, a text, a mapping or a sequence of such, or a union."""
    kind = get_origin(hint) or hint
    inner = get_args(hint)
    if kind is Any:
        return True
    if kind is UnionType:
        return any(has_type(value, each) for each in inner)
    if kind is Mapping:
        return isinstance(value, dict) and all(has_type(item, inner[1]) for item in value.values())
    if kind is Sequence:
        return isinstance(value, list) and all(has_type(item, inner[0]) for item in value)
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, kind)


def read_summary(files: RunFolder) -> dict[str, Any]:
    """The content of summary.json; empty while the run continues, or if the file is damaged."""
    try:
        return read_whole_summary(files)
    except (OSError, UserError):
        return {}


def _content(path: Path, read: Callable[[], Any]) -> dict[str, Any]:
    if not (path.exists() or path.is_symlink()):
        return {}
    try:
        with reading(path, "restore it, or delete it to continue without it"):
            value = read()
    except FileNotFoundError:  # deleted at this moment
        return {}
    except ConfigError as error:  # it names the file and the line
        raise UserError(str(error), remedy="restore the file, or delete it to continue without it") from error
    if isinstance(value, dict):
        return value
    return {}


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of each leaf of nested mappings and lists of mappings."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            place = f"{path}.{key}" if path else str(key)
            yield from flat(item, place)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from flat(item, f"{path}.{i}")
    elif path:
        yield path, value


MOST_FOLDERS = 10_000  # searched for runs


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """The run folders that are given, are below a given folder, or match a pattern; each once, in the given order.

    Raises: UserError if one of `places` leads to no run, or has too many folders below it to search.
    """
    folders: dict[Path, Path] = {}
    for place in places:
        if Path(place).exists():
            matches = [Path(place)]
        else:
            matches = sorted(map(Path, glob.glob(str(place), recursive=True)))
        count = itertools.count(1)
        runs: list[Path] = []
        for match in matches:
            runs += _below(match, match, count)
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
    with reading(place / "sweep.json", "restore it, or delete it to continue without it"):
        listed = [str(run["folder"]) for run in read_mapping(place / "sweep.json").get("runs", ())]
    for folder in listed:  # in this order: the first cell is the baseline
        if RunFolder(place / folder).has_run:
            yield place / folder
    children = [child for child in place.iterdir() if child.is_dir()]
    for child in sorted(children, key=lambda child: _natural(child.name)):
        yield from _below(child, start, count)


def _natural(name: str) -> list[tuple[int, str]]:
    """`seed-2` before `seed-10`."""
    key: list[tuple[int, str]] = []
    for is_number, characters in itertools.groupby(name, str.isdecimal):
        part = "".join(characters)
        key.append((int(part), "") if is_number else (-1, part))
    return key


def no_runs(place: Path, exists: bool = False) -> UserError:
    """Return the error for a path that is not a run; it suggests the neighbouring run that was probably meant."""
    what = "give run folders, a sweep's folder, or a pattern in quotes"
    if exists:
        return UserError(f"{place} and the folders below contain no run", remedy=what)
    folders: list[Path] = []
    if "*" not in place.name:
        folders = _folders_beside(place)
    near = nearest(place.name, [folder.name for folder in folders])
    if near is not None:
        what = f"did you mean {str(place.parent / near)!r}?"
    else:
        runs = [str(folder) for folder in sorted(folders) if _holds_runs(folder)]
        if runs:
            what = f"known: {', '.join(runs)}"
    return UserError(f"{place} does not exist", remedy=what)


def refuse_missing_run(place: Path) -> None:
    """Raise UserError for a path, of a model or a run, that does not exist and was meant to be a run: beside it are
    runs, or only its folder is mistyped, `run/mine` for `runs/mine`."""
    if place.exists():
        return
    if any(map(_holds_runs, _folders_beside(place))):
        raise no_runs(place)
    near = nearest(place.parent.name, [folder.name for folder in _folders_beside(place.parent)])
    meant = place.parent.parent / str(near) / place.name
    if near is not None and meant.exists():
        raise UserError(f"{place} does not exist", remedy=f"did you mean {str(meant)!r}?")


def _folders_beside(place: Path) -> list[Path]:
    if place.parent.is_dir():
        return [child for child in place.parent.iterdir() if child.is_dir()]
    return []


def _holds_runs(place: Path) -> bool:
    try:
        return (place / "sweep.json").is_file() or RunFolder(place).has_run
    except OSError:  # a folder that can't be read
        return False
