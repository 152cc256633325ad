"""Finds the folders of runs: those that are named, are below a folder, or match a pattern."""

import glob
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path

from proxima.data import UserError
from proxima.data.errors import nearest
from proxima.experiments.run_reader import read_mapping
from proxima.runtime.state.folder import RunFolder
from proxima.system.damage import reading

MOST_FOLDERS = 10_000  # searched for runs


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
    with reading(place / "sweep.json", "restore it, or delete it to continue without it"):
        listed = [str(run["folder"]) for run in read_mapping(place / "sweep.json").get("runs", ())]
    for folder in listed:  # in this order: the first cell is the baseline
        if RunFolder(place / folder).has_run:
            yield place / folder
    for child in sorted((child for child in place.iterdir() if child.is_dir()), key=lambda child: _natural(child.name)):
        yield from _below(child, start, count)


def _natural(name: str) -> list[tuple[int, str]]:
    """`seed-2` before `seed-10`."""
    parts = ["".join(group) for _, group in itertools.groupby(name, str.isdecimal)]
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def no_runs(place: Path, exists: bool = False) -> UserError:
    """Return the error for a path that is not a run; it suggests the neighbouring run that was probably meant."""
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
    return [child for child in place.parent.iterdir() if child.is_dir()] if place.parent.is_dir() else []


def _holds_runs(place: Path) -> bool:
    try:
        return (place / "sweep.json").is_file() or RunFolder(place).has_run
    except OSError:  # a folder that can't be read
        return False
