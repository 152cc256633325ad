"""Locates the files of a source, in a path, the hub's cache, the hub, or the cache of `datasets`, sorted by side."""

import glob
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxima.data import UserError
from proxima.model.hub_names import hub_is_reachable
from proxima.prepare.catalog import Hub, Part
from proxima.prepare.read_files import SUFFIXES
from proxima.task.hub import load_hub_dataset

_METADATA = ("state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json", "card.json", "config.json")
_DEFAULT_SUBSETS = ("main", "all", "default")  # if a data set has several and none is named
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")
CARD = "card.json"  # in every prepared folder

NamedFiles = list[tuple[Path, str]]  # each file with its name in the card
BySide = defaultdict[str, NamedFiles]  # "" for files whose names don't tell the side
Sides = dict[str, tuple[tuple[Path, str], ...]]  # `train` and `test`


class DataNotFound(UserError):
    """The data was not found in this place; another may have it."""


@dataclass(frozen=True)
class SourceFiles:
    """The files of a part.

    Args:
        kind: `hub` or `files`.
        name: data set on the hub, or the path as it was given.
        revision: commit on the hub; None: local files, or unknown.
        license: None: unknown.
        sides: files of `train` and `test`, each with its name in the card.
    """

    kind: str
    name: str
    revision: str | None
    license: str | None
    sides: Sides


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
        sides = _sides(_by_side(_local(given, subset)), part, given)
        return SourceFiles("files", given, None, part.license, sides)
    by_name = {hub.name: hub for hub in part.hubs}
    hubs = part.hubs if given is None else (by_name.get(given, Hub(given)),)
    problems = []
    for hub in hubs:
        try:
            return _from_hub(hub if subset is None else Hub(hub.name, (subset,), hub.license), part, revision)
        except DataNotFound as problem:
            problems.append(str(problem))
    others = "" if len(hubs) == 1 else f" (nor {', '.join(hub.name for hub in hubs[1:])})"
    command = f"hf download --repo-type dataset {hubs[0].name}"
    remedy = f"give a copy with --from PATH (Parquet or JSON Lines), or download it where there is a network: {command}"
    raise UserError(f"{part.name}: {problems[0]}{others}", remedy=remedy)


def _is_hub_name(given: str) -> bool:
    named = re.fullmatch(r"[^/*? .~][^/*? ]*/[^/*? ]+", given) is not None and not given.endswith(SUFFIXES)
    return named and not Path(given).exists()


def _local(given: str, subset: str | None) -> NamedFiles:
    """Return the data files below a path, with their names relative to it, in sorted order."""
    place = Path(given).expanduser()
    if place.is_file():
        return [(place, place.name)]
    if place.is_dir():
        if (place / CARD).is_file() and any(place.glob("*.parquet")):
            raise UserError(f"{given} is prepared already (it holds a {CARD})", remedy="give the data as published")
        return _below(place, () if subset is None else (subset,), given)
    paths = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
    if not paths:
        message = f"{given!r}: no such file or folder, and no name on the hub (owner/name)"
        raise UserError(message, remedy="a pattern looks like 'data/*.parquet'")
    return [(path, path.name) for path in paths if path.is_file() and path.suffix in SUFFIXES]


def _below(folder: Path, subsets: tuple[str, ...], given: str) -> NamedFiles:
    def inside(*names: str) -> Path | None:
        tops = (folder, folder / "data")
        return next((top / name for top in tops for name in names if (top / name).is_dir()), None)

    starts = [start for name in subsets if (start := inside(name))]
    if subsets and not starts:  # configurations that are files: aime2025-I.jsonl
        named = [pair for pair in _files(folder, folder) if any(n.lower() in pair[0].stem.lower() for n in subsets)]
        if not named:
            raise DataNotFound(f"{given} holds no subset {', '.join(subsets)}")
        return named
    if len(starts) < len(subsets):
        raise DataNotFound(f"{given} holds {len(starts)} of the subsets {', '.join(subsets)}")
    return [pair for start in starts or [inside(*_DEFAULT_SUBSETS) or folder] for pair in _files(start, folder)]


def _files(start: Path, top: Path) -> NamedFiles:
    paths = (path for path in start.rglob("*") if path.suffix in SUFFIXES and path.name not in _METADATA)
    data_files = [(path, path.relative_to(top)) for path in paths if path.is_file()]
    visible = [
        (path, name.as_posix()) for path, name in data_files if not any(part.startswith(".") for part in name.parts)
    ]
    return sorted(visible, key=lambda pair: pair[1])


def _by_side(files: NamedFiles) -> BySide:
    """Group files by side, which the name of the file (`train-00000-of-00002.parquet`) or of a folder
    (`test/algebra/1.json`) tells."""
    sides: BySide = defaultdict(list)
    for path, name in files:
        sides[_side(name)].append((path, name))
    return sides


def _sides(files: BySide, part: Part, given: str) -> Sides:
    """Select the files of each side that the part uses; DataNotFound if there are none, or some are missing."""
    if part.side == "test":
        chosen = {"test": files["test"] or files[""] or files["train"]}  # some sets call their only split train
    else:
        chosen = {"train": files["train"] or files[""], "test": files["test"]}
    sides = {side: tuple(of) for side, of in chosen.items() if of}
    if part.side not in sides:
        names = [name for of in files.values() for _, name in of]
        seen = ", ".join(names[:5]) or "no data file"
        raise DataNotFound(f"{given} holds no {part.side} side ({seen}); expected Parquet, JSON Lines, JSON or Arrow")
    _require_all_shards([pair for of in sides.values() for pair in of], given)
    return sides


def _side(name: str) -> str:
    *folders, last = Path(name.lower()).parts
    for word in (last, *reversed(folders)):
        for side in ("train", "test", "validation"):
            if word == side or re.match(rf"{side}[^a-z]", word):
                return side
    return ""


def _require_all_shards(files: Iterable[tuple[Path, str]], given: str) -> None:
    """Refuse `-00000-of-00002` without `-00001-of-00002`, an interrupted download."""
    seen = Counter((match[1], match[3]) for _, name in files if (match := _SHARD.fullmatch(name)))
    for (stem, count), shards in seen.items():
        if shards != int(count):
            raise DataNotFound(f"{given} holds {shards} of the {int(count)} files {stem}-*-of-{count}")


def _from_hub(hub: Hub, part: Part, revision: str | None) -> SourceFiles:
    from huggingface_hub import constants, snapshot_download

    patterns = [f"*{suffix}" for suffix in SUFFIXES]
    disabled = constants.HF_HUB_OFFLINE
    offline = disabled or not hub_is_reachable()
    hub_state = "is off (HF_HUB_OFFLINE)" if disabled else "can't be reached"
    problem = f"{hub.name} is not in the cache, and the hub {hub_state}"
    for cached in (True,) if offline else (True, False):
        try:
            snapshot = snapshot_download(
                hub.name, repo_type="dataset", revision=revision, allow_patterns=patterns, local_files_only=cached
            )
            folder = Path(snapshot)
            sides = _sides(_by_side(_below(folder, hub.subsets, hub.name)), part, hub.name)
        except DataNotFound as error:
            problem = str(error)
        except Exception as error:  # the library and the network code below it raise dozens of types
            if not cached:
                reason = " ".join(str(error).split())[:160]
                problem = f"{hub.name} can't be fetched: {type(error).__name__}: {reason}"
        else:
            if part.side == "train" and "test" in part.published and "test" not in sides and cached and not offline:
                continue  # the cache is incomplete
            return SourceFiles("hub", hub.name, _commit(folder.name) or revision, hub.license, sides)
    with suppress(UserError, ImportError):
        return _from_datasets(hub, part, revision)
    raise DataNotFound(problem)


def _from_datasets(hub: Hub, part: Part, revision: str | None) -> SourceFiles:
    """Locate the Arrow files in the cache of the `datasets` library."""
    files: BySide = defaultdict(list)
    for side in ("train", "test"):
        with suppress(UserError):
            stored: list[tuple[str | None, Any]] = [
                (subset, load_hub_dataset(hub.name, subset, side, revision)) for subset in hub.subsets or (None,)
            ]
            paths = [(subset, Path(entry["filename"])) for subset, data in stored for entry in data.cache_files]
            files[side] = [(path, path.name if subset is None else f"{subset}/{path.name}") for subset, path in paths]
    commits = {path.parent.name for of in files.values() for path, _ in of}
    sides = _sides(files, part, hub.name)
    commit = _commit(commits.pop()) if len(commits) == 1 else None
    return SourceFiles("hub", hub.name, commit or revision, hub.license, sides)


def _commit(name: str) -> str | None:
    """Return the name if it is a commit hash, else None."""
    return name if re.fullmatch(r"[0-9a-f]{40}", name) else None
