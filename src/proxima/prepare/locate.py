"""Locates the files of a source, in a path, the hub's cache or the hub, sorted by side."""

import glob
import os
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from proxima.data import UserError
from proxima.model.files import hub_is_reachable
from proxima.prepare.catalog import Hub, Part
from proxima.prepare.read_files import is_data_file
from proxima.system.user_modules import require_package
from proxima.task.file_formats import SUFFIXES

_DEFAULT_SUBSETS = ("main", "all", "default")  # if a data set has several and none is named
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")
CARD = "card.json"  # in every prepared folder

NamedFiles = list[tuple[Path, str]]  # each file with its name in the card
BySide = dict[str, NamedFiles]  # "" for files whose names don't tell the side


class DataNotFound(UserError):
    """The data was not found in this place; another may have it."""


@dataclass(frozen=True)
class SourceFiles:
    """The files of a part.

    Args:
        kind: `hub` or `files`.
        name: data set on the hub, or the path as it was given.
        revision: commit on the hub; None: local files.
        license: None: unknown.
        sides: files of `train` and `test`, each with its name in the card.
    """

    kind: str
    name: str
    revision: str | None
    license: str | None
    sides: BySide


def locate_files(
    part: Part, given: str | None = None, *, subset: str | None = None, revision: str | None = None
) -> SourceFiles:
    """Locate the files of a part.

    Args:
        part: what to locate.
        given: a file, a folder, a pattern, or a data set on the hub; None: the first available data set of the part.
        subset: a folder inside, or a configuration on the hub; None: the part's, else `main`, `all` or `default`.
        revision: commit, tag or branch on the hub; None: the cached one, else the newest.
    Raises:
        UserError: the source does not exist or has no data, or the hub can't be reached.
    """
    if given is not None and not _is_hub_name(given):
        if revision is not None:
            raise UserError(f"revision={revision!r} is for data sets on the hub; {given!r} is a path")
        return SourceFiles("files", given, None, part.license, _local(given, subset, part))
    hubs = part.hubs
    if given is not None:
        hubs = tuple(hub for hub in part.hubs if hub.name == given) or (Hub(given),)
    problems = []
    for hub in hubs:
        if subset is not None:
            hub = Hub(hub.name, (subset,), hub.license)
        try:
            return _from_hub(hub, part, revision)
        except DataNotFound as problem:
            problems.append(str(problem))
    what = f"{part.name}: {problems[0]}"
    if len(hubs) > 1:
        what += f" (nor {', '.join(hub.name for hub in hubs[1:])})"
    command = f"hf download --repo-type dataset {hubs[0].name}"
    copy = "give a copy with --from PATH (Parquet, JSON Lines, JSON or CSV)"
    raise UserError(what, remedy=f"{copy}, or download it where there is a network: {command}")


def _is_hub_name(given: str) -> bool:
    named = re.fullmatch(r"[^/*? .~][^/*? ]*/[^/*? ]+", given) is not None and not is_data_file(given)
    return named and not Path(given).exists()


def _local(given: str, subset: str | None, part: Part) -> BySide:
    """Find the files of a path: of a folder both sides, else the part's own."""
    place = Path(given).expanduser()
    if place.is_dir():
        if (place / CARD).is_file() and any(place.glob("*.parquet")):
            raise UserError(f"{given} is prepared already (it holds a {CARD})", remedy="give the data as published")
        subsets = () if subset is None else (subset,)
        return _sides(_found(place, subsets, given), part, given)
    paths = [place]
    if not place.is_file():
        paths = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
    if not paths:
        message = f"{given!r}: no such file or folder, and no name on the hub (owner/name)"
        raise UserError(message, remedy="write a pattern such as 'data/*.parquet'")
    files = [(path, path.name) for path in paths if is_data_file(path)]
    return _sides({part.side: files}, part, given)


def _found(folder: Path, subsets: tuple[str, ...], given: str) -> BySide:
    """Find the data files below a folder by split, as `datasets` tells it from the names of files and folders."""

    found = [_subfolder(folder, [name]) for name in subsets]
    starts = [start for start in found if start is not None]
    sides: BySide = defaultdict(list)
    if starts:
        searched = starts
    elif subsets:  # configurations that are files: aime2025-I.jsonl
        searched = [folder]
    else:
        searched = [_subfolder(folder, _DEFAULT_SUBSETS) or folder]
    for start in searched:
        for side, paths in split_files(start).items():
            sides[side] += [(path, path.relative_to(folder).as_posix()) for path in paths]
    if subsets and not starts:
        sides = {"": [(path, name) for path, name in _all_files(sides) if _names_one_of(name, subsets)]}
        starts = [path for path, _ in sides[""]]
    if len(starts) < len(subsets):
        raise DataNotFound(f"{given} holds {len(starts)} of the subsets {', '.join(subsets)}")
    return sides


def _subfolder(folder: Path, names: Sequence[str]) -> Path | None:
    """The first folder of these names in a folder, or in its `data`."""
    for top in (folder, folder / "data"):
        for name in names:
            if (top / name).is_dir():
                return top / name
    return None


def _all_files(sides: BySide) -> NamedFiles:
    """The files of all sides."""
    return list(chain.from_iterable(sides.values()))


def _names_one_of(file: str, subsets: Sequence[str]) -> bool:
    return any(subset.lower() in file.lower() for subset in subsets)


def split_files(folder: Path) -> dict[str, list[Path]]:
    """The data files below a folder by split, in sorted order, by the rules of `datasets`; UserError without it."""
    require_package("datasets", "data sets in folders need", "proxima-rl[data]")
    from datasets.data_files import DataFilesDict, get_data_patterns

    try:
        found = DataFilesDict.from_patterns(get_data_patterns(str(folder)), base_path=str(folder))
    except FileNotFoundError:
        return {}
    whole = Path(os.path.abspath(folder))  # as `datasets` names it; messages name files as the user does
    sides: dict[str, list[Path]] = {}
    for side, names in found.items():
        paths = [folder / Path(name).relative_to(whole) for name in sorted(names)]
        sides[str(side)] = list(filter(is_data_file, paths))
    return sides


def _sides(files: BySide, part: Part, given: str) -> BySide:
    """Select the files of each side that the part uses; DataNotFound if there are none, or some are missing."""
    if part.side == "test":  # some sets call their only split train
        chosen = {"test": files.get("test") or files.get("") or files.get("train")}
    else:
        chosen = {"train": files.get("train") or files.get(""), "test": files.get("test")}
    sides = {side: of for side, of in chosen.items() if of}
    if part.side not in sides:
        seen = ", ".join(name for _, name in _all_files(files)[:5]) or "no data file"
        raise DataNotFound(f"{given} holds no {part.side} side ({seen}); expected Parquet, JSON Lines or JSON")
    # `-00000-of-00002` without `-00001-of-00002` is an interrupted download
    matches = [_SHARD.fullmatch(name) for _, name in _all_files(sides)]
    shards = Counter((match[1], match[3]) for match in matches if match is not None)
    for (stem, count), seen_shards in shards.items():
        if seen_shards != int(count):
            raise DataNotFound(f"{given} holds {seen_shards} of the {int(count)} files {stem}-*-of-{count}")
    return sides


def _from_hub(hub: Hub, part: Part, revision: str | None) -> SourceFiles:
    from huggingface_hub import constants, snapshot_download

    patterns = [f"*{suffix}" for suffix in SUFFIXES] + [f"*{suffix}.gz" for suffix in SUFFIXES]
    disabled = constants.HF_HUB_OFFLINE
    offline = disabled or not hub_is_reachable()
    hub_state = "is off (HF_HUB_OFFLINE)" if disabled else "can't be reached"
    problem = f"{hub.name} is not in the cache, and the hub {hub_state}"
    places = [True] if offline else [True, False]  # the cache, then the hub
    for cached in places:
        try:
            snapshot = snapshot_download(
                hub.name, repo_type="dataset", revision=revision, allow_patterns=patterns, local_files_only=cached
            )
            folder = Path(snapshot)
            sides = _sides(_found(folder, hub.subsets, hub.name), part, hub.name)
        except DataNotFound as error:
            problem = str(error)
        except Exception as error:  # the library and the network code below it raise dozens of types
            if not cached:
                reason = " ".join(str(error).split())[:160]
                problem = f"{hub.name} can't be fetched: {type(error).__name__}: {reason}"
        else:
            lacks_test = part.side == "train" and "test" in part.published and "test" not in sides
            if lacks_test and cached and not offline:
                continue  # the cache is incomplete
            return SourceFiles("hub", hub.name, folder.name, hub.license, sides)  # a snapshot is named by its commit
    raise DataNotFound(problem)
