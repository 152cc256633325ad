"""A run read back from its folder: its config, its curves against any axis, how it ended. Also one that is going on, or
was killed."""

import difflib
import glob
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proxima.config.errors import ConfigError, suggestion
from proxima.config.read import read_yaml, shown_path
from proxima.data import UserError
from proxima.runtime.folder import RunFolder
from proxima.runtime.metric_names import metric_of

# An axis → the key of metrics.jsonl whose running sum it is; steps count themselves.
AXES: dict[str, str | None] = {
    "step": None,
    "generated": "tokens/generated",
    "trained": "tokens/trained",
    "time": "time/step",
    "cpu": "time/cpu",
}

Record = Mapping[str, Any]
Curve = list[tuple[float, float]]


class NoMetrics(UserError):
    """The run has not recorded a step or an evaluation yet."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run.

    Args:
        folder: where it lies.
        seed: of the run; None where neither config nor summary says.
        config: dotted path → value of config.yaml; empty where that is missing.
        train, evals: records of metrics.jsonl by kind; of several evaluations of a step the last.
        status: `done`, `stopped`, `failed`, or `unfinished` where summary.json is missing.
        summary, environment: those files, empty where they are missing.
    """

    folder: Path
    seed: int | None
    config: Mapping[str, Any] = field(repr=False)
    train: tuple[Record, ...] = field(repr=False)
    evals: tuple[Record, ...] = field(repr=False)
    status: str
    summary: Record = field(repr=False)
    environment: Record = field(repr=False)

    @property
    def steps(self) -> int:
        """Steps finished."""
        return int(self.train[-1]["step"]) if self.train else 0

    def has(self, axis: str) -> bool:
        """True when every step recorded what the axis sums; so also before the first step."""
        key = AXES[axis]
        return key is None or all(r.get(key) is not None for r in self.train)

    def position(self, axis: str) -> dict[int, float]:
        """Step → where the axis stands after it, from 0 at step 0.

        `time` is the training clock: the sum of `time/step`, in which evaluations and checkpoints are not counted.
            `cpu` is that of
        `time/cpu`; `generated` and `trained` are tokens.
        """
        key = AXES[axis]
        steps = [int(r["step"]) for r in self.train]
        if key is None:
            return {0: 0.0, **{step: float(step) for step in steps}}
        sums = itertools.accumulate(float(r.get(key) or 0.0) for r in self.train)
        return {0: 0.0, **dict(zip(steps, sums, strict=True))}

    def curve(self, key: str, axis: str = "step") -> Curve:
        """(position on the axis after the step, value) of a metric of the training records, under any of its names;
        steps without it are left out."""
        at = self.position(axis)
        values = ((r, metric_of(r, key)) for r in self.train)
        return [(at[int(r["step"])], float(value)) for r, value in values if value is not None]

    def accuracy(self, axis: str = "step") -> Curve:
        """Held-out accuracy by axis; evaluations without one (no reward says what is right) are left out."""
        at = self.position(axis)
        return [
            (at[int(r["step"])], float(r["accuracy"]))
            for r in self.evals
            if r.get("accuracy") is not None and int(r["step"]) in at
        ]

    def total(self, key: str) -> float | None:
        """The sum of a metric over the steps, under any of its names; None where no step has it."""
        known = [float(value) for r in self.train if (value := metric_of(r, key)) is not None]
        return sum(known) if known else None

    def rate(self, tokens: str, time: str) -> float | None:
        """Tokens a second over the whole run."""
        amount, spent = self.total(tokens), self.total(time)
        return amount / spent if amount is not None and spent else None

    def first_reach(self, target: float, axis: str = "step") -> float | None:
        """Where the held-out accuracy reaches `target`; None if it never does.

        The first evaluation at or above it, on the straight line from the evaluation before; where the first one
        is there already (an evaluation before the first step would be at 0), its own place.
        """
        curve = self.accuracy(axis)
        for i, (x, value) in enumerate(curve):
            if value >= target:
                if i == 0:
                    return x
                x0, before = curve[i - 1]
                return x0 + (x - x0) * (target - before) / (value - before)
        return None


def read_run(folder: str | Path) -> Run:
    """Read a run from its folder.

    Raises:
        ValueError: the folder holds no run, the run has recorded nothing yet, or a file in it is damaged; says which.
    """
    place = RunFolder(folder)
    if not place.has_run:
        raise UserError(
            f"{shown_path(place.path)} holds no run; give the folder that `proxima train` named in its first line"
        )
    records = place.read_metrics()
    if not records:
        raise NoMetrics(
            f"{shown_path(place.path)} holds a run without metrics; it has not finished a step or an evaluation yet"
        )
    config = _config(place.config)
    summary, environment = _mapping(place.summary), _mapping(place.environment)
    seed = config.get("seed", summary.get("seed"))
    evals = {int(r["step"]): r for r in records if r.get("kind") == "eval"}
    return Run(
        folder=place.path,
        seed=seed if isinstance(seed, int) else None,
        config=config,
        train=tuple(r for r in records if r.get("kind") == "train"),
        evals=tuple(evals[step] for step in sorted(evals)),
        status=str(summary.get("status", "unfinished")),
        summary=summary,
        environment=environment,
    )


def find_runs(places: Sequence[str | Path]) -> list[Path]:
    """The run folders that are named, lie below a named folder, or match a pattern; each once, in the order of the
    names.

    Raises:
        ValueError: one of `places` leads to no run; names it and what lies near.
    """
    found: dict[Path, Path] = {}
    for place in places:
        matches = (
            [Path(place)]
            if Path(place).exists()
            else [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
        )
        runs = [run for match in matches for run in _below(match)]
        if not runs:
            raise UserError(_nothing_at(Path(place), bool(matches)))
        for run in runs:
            found.setdefault(run.resolve(), run)
    return list(found.values())


def _below(place: Path) -> Iterator[Path]:
    if place.is_file():
        return
    if RunFolder(place).has_run:
        yield place
        return
    for listed in _mapping(place / "sweep.json").get(
        "runs", ()
    ):  # in the order of the sweep: its first cell is the baseline
        if RunFolder(place / listed["folder"]).has_run:
            yield place / listed["folder"]
    for child in sorted((child for child in place.iterdir() if child.is_dir()), key=lambda child: _natural(child.name)):
        yield from _below(child)


def _natural(name: str) -> list[tuple[int, str]]:
    """`seed-2` before `seed-10`."""
    parts = ["".join(group) for _, group in itertools.groupby(name, str.isdigit)]
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def _nothing_at(place: Path, exists: bool) -> str:
    if exists:
        return (
            f"{place}: no run here nor in the folders below; give run folders, a sweep's folder, or a pattern in quotes"
        )
    folder = place.parent
    folders = (
        [child for child in folder.iterdir() if child.is_dir()] if folder.is_dir() and "*" not in place.name else []
    )
    near = difflib.get_close_matches(place.name, [child.name for child in folders], n=1, cutoff=0.6)
    names = near or [child.name for child in folders if _holds_runs(child)]
    hint = suggestion(place.name, names) if names else "give run folders, a sweep's folder, or a pattern"
    return f"{place}: no such run; {hint}"


def _holds_runs(place: Path) -> bool:
    """A folder is a run or a sweep: what else lies there is no suggestion, unless its name is near."""
    try:
        return (place / "sweep.json").is_file() or RunFolder(place).has_run
    except OSError:
        return False


def _config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(_flat("", read_yaml(path).to_python()))
    except ConfigError as error:
        raise UserError(f"{error}; restore the file, or delete it to compare without") from error


def _flat(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flat(f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for i, item in enumerate(value):
            yield from _flat(f"{path}.{i}", item)
    else:
        yield path, value


def _mapping(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(
            f"{os.fspath(path)} can't be read ({error}); restore it, or delete it to compare without"
        ) from error
    return value if isinstance(value, dict) else {}
