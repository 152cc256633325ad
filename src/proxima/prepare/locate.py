"""Where the files are: a path, the hub's cache, the hub, or the cache of the `datasets` library; and which of them are
for testing."""

import glob
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from proxima.data import UserError
from proxima.prepare.catalog import Hub, Part
from proxima.prepare.read_files import SUFFIXES

_NO_DATA = ("state.json", "dataset_info.json", "dataset_dict.json", "dataset_infos.json", "card.json", "config.json")
_USUAL_SUBSETS = ("main", "all", "default")  # where a data set has several and none was asked for
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})(.*)")
CARD = "card.json"  # what a prepared folder has


class DataNotFound(ValueError):
    """The data can't be had from this place; another may have them."""


@dataclass(frozen=True)
class SourceFiles:
    """Where a part comes from.

    Args:
        kind: `hub` or `files`.
        name: data set on the hub, or the path as it was given.
        revision: commit on the hub; None: files, or not known.
        license: None: unknown.
        sides: files of `train` and `test`, each with the name the card gives it.
    """

    kind: str
    name: str
    revision: str | None
    license: str | None
    sides: dict[str, tuple[tuple[Path, str], ...]]


def locate_files(
    part: Part, given: str | None = None, *, subset: str | None = None, revision: str | None = None
) -> SourceFiles:
    """The files of a part.

    Args:
        part: what is wanted.
        given: a file, a folder, a pattern, or a data set on the hub; None: the data sets that the part names, the first
            that can be had.
        subset: a folder inside, or a configuration on the hub; None: what the part names, or `main`, `all` or `default`
            where there is one.
        revision: commit, tag or branch on the hub; None: what is in the cache, else the newest.
    Raises:
        ValueError: nothing is there, nothing in it is data, or no place can be reached; one line with the remedy.
    """
    if given is not None and not _is_hub_name(given):
        if revision is not None:
            raise UserError(f"revision={revision!r} is for data sets on the hub; {given!r} is a path")
        return SourceFiles("files", given, None, part.license, _sides(_local(given, subset), part, given))
    known = {hub.name: hub for hub in part.hubs}
    hubs = part.hubs if given is None else (known.get(given, Hub(given)),)
    problems = []
    for hub in hubs:
        try:
            return _from_hub(hub if subset is None else Hub(hub.name, (subset,), hub.license), part, revision)
        except DataNotFound as problem:
            problems.append(str(problem))
    others = "" if len(hubs) == 1 else f" (nor {', '.join(hub.name for hub in hubs[1:])})"
    raise UserError(
        f"{part.name}: {problems[0]}{others}; give a copy with --from PATH (Parquet or JSON Lines), or fetch it "
        "where there is a network: "
        f"hf download --repo-type dataset {hubs[0].name}"
    )


def _is_hub_name(given: str) -> bool:
    local = (
        given.startswith((".", "/", "~"))
        or given.endswith(SUFFIXES)
        or "*" in given
        or "?" in given
        or Path(given).exists()
    )
    return not local and given.count("/") == 1 and all(given.split("/")) and " " not in given


def _local(given: str, subset: str | None) -> list[tuple[Path, str]]:
    """Data files below a path, with their names inside it, in sorted order."""
    place = Path(given).expanduser()
    if place.is_file():
        return [(place, place.name)]
    if place.is_dir():
        if (place / CARD).is_file() and any(place.glob("*.parquet")):
            raise UserError(f"{given} is prepared already (it holds a {CARD}); give the data as published")
        return _below(place, () if subset is None else (subset,), given)
    found = [Path(name) for name in sorted(glob.glob(str(place), recursive=True))]
    if not found:
        raise UserError(
            f"{given!r}: no such file or folder, and no name on the hub (owner/name); a pattern looks like "
            "'data/*.parquet'"
        )
    return [(path, path.name) for path in found if path.is_file() and path.suffix in SUFFIXES]


def _below(folder: Path, subsets: tuple[str, ...], given: str) -> list[tuple[Path, str]]:
    tops = [folder, folder / "data"]
    if subsets:
        wanted = [next((top / name for top in tops if (top / name).is_dir()), None) for name in subsets]
        if any(wanted):
            starts = [start for start in wanted if start is not None]
            if len(starts) < len(subsets):
                raise DataNotFound(f"{given} holds {len(starts)} of the subsets {', '.join(subsets)}")
        elif files := [
            pair for pair in _files(folder, folder) if any(name.lower() in pair[0].stem.lower() for name in subsets)
        ]:
            return files  # configurations that are files: aime2025-I.jsonl
        else:
            raise DataNotFound(f"{given} holds no subset {', '.join(subsets)}")
    else:
        usual = next((top / name for top in tops for name in _USUAL_SUBSETS if (top / name).is_dir()), None)
        starts = [usual or folder]
    return [pair for start in starts for pair in _files(start, folder)]


def _files(start: Path, top: Path) -> list[tuple[Path, str]]:
    found = (
        (path, path.relative_to(top).as_posix())
        for path in start.rglob("*")
        if path.suffix in SUFFIXES and path.is_file()
    )
    data = (
        pair
        for pair in found
        if pair[0].name not in _NO_DATA and not any(word.startswith(".") for word in Path(pair[1]).parts)
    )
    return sorted(data, key=lambda pair: pair[1])


def _sides(files: list[tuple[Path, str]], part: Part, given: str) -> dict[str, tuple[tuple[Path, str], ...]]:
    """The files of each side: by a file's name (`train-00000-of-00002.parquet`), or a folder's
    (`test/algebra/1.json`)."""
    by_name: dict[str, list[tuple[Path, str]]] = {"train": [], "test": [], "validation": [], "": []}
    for path, name in files:
        by_name[_side(name)].append((path, name))
    if part.side == "test":
        chosen = by_name["test"] or by_name[""] or by_name["train"]  # some sets call their only split train
        sides = {"test": tuple(chosen)} if chosen else {}
    else:
        train = by_name["train"] or by_name[""]
        sides = {side: tuple(found) for side, found in (("train", train), ("test", by_name["test"])) if found}
    if part.side not in sides:
        seen = ", ".join(name for _, name in files[:5]) or "no data file"
        raise DataNotFound(f"{given} holds no {part.side} side ({seen}); wanted is Parquet, JSON Lines, JSON or Arrow")
    _whole_shards([pair for found in sides.values() for pair in found], given)
    return sides


def _side(name: str) -> str:
    *folders, last = Path(name.lower()).parts
    for word in (last, *reversed(folders)):
        for side in ("train", "test", "validation"):
            if word == side or re.match(rf"{side}[^a-z]", word):
                return side
    return ""


def _whole_shards(files: Iterable[tuple[Path, str]], given: str) -> None:
    """`-00000-of-00002` without `-00001-of-00002` is a download that was cut off."""
    seen: dict[tuple[str, str], int] = {}
    for _, name in files:
        if match := _SHARD.fullmatch(name):
            seen[match[1], match[3]] = seen.get((match[1], match[3]), 0) + 1
    for (stem, count), found in seen.items():
        if found != int(count):
            raise DataNotFound(f"{given} holds {found} of the {int(count)} files {stem}-*-of-{count}")


def _from_hub(hub: Hub, part: Part, revision: str | None) -> SourceFiles:
    from huggingface_hub import constants, snapshot_download

    patterns = [f"*{suffix}" for suffix in SUFFIXES]
    offline = constants.HF_HUB_OFFLINE or not _reachable(constants.ENDPOINT)
    reason = "is not in the cache, and the hub " + (
        "is off (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else "can't be reached"
    )
    for local in (True,) if offline else (True, False):
        try:
            folder = Path(
                snapshot_download(
                    hub.name, repo_type="dataset", revision=revision, allow_patterns=patterns, local_files_only=local
                )
            )
            sides = _sides(_below(folder, hub.subsets, hub.name), part, hub.name)
        except DataNotFound as problem:
            reason = str(problem)
        except (
            Exception
        ) as problem:  # the library and the network below it raise dozens of kinds; each means: not from here
            if not local:
                reason = f"can't be fetched: {type(problem).__name__}: {' '.join(str(problem).split())[:160]}"
        else:
            if part.side == "train" and "test" in part.published and "test" not in sides and local and not offline:
                continue  # the cache holds a part of it
            return SourceFiles(
                "hub", hub.name, folder.name if _is_commit(folder.name) else revision, hub.license, sides
            )
    with suppress(ValueError, ImportError):
        return _from_datasets(hub, part, revision)
    raise DataNotFound(reason if reason.startswith(hub.name) else f"{hub.name} {reason}")


def _from_datasets(hub: Hub, part: Part, revision: str | None) -> SourceFiles:
    """What the `datasets` library has in its own cache, as Arrow files."""
    from proxima.task.hub import load_hub_dataset

    sides: dict[str, tuple[tuple[Path, str], ...]] = {}
    commits = set()
    for side in ("train", "test"):
        files: list[tuple[Path, str]] = []
        try:
            for subset in hub.subsets or (None,):
                stored: Any = load_hub_dataset(hub.name, subset, side, revision)
                paths = [Path(entry["filename"]) for entry in stored.cache_files]
                files += [(path, path.name if subset is None else f"{subset}/{path.name}") for path in paths]
                commits |= {path.parent.name for path in paths}
        except ValueError:
            continue
        if files:
            sides[side] = tuple(files)
    if part.side == "test":
        sides = {"test": sides.get("test") or sides["train"]} if sides else {}
    if part.side not in sides:
        raise DataNotFound(f"{hub.name} is in no cache")
    commit = commits.pop() if len(commits) == 1 else ""
    return SourceFiles("hub", hub.name, commit if _is_commit(commit) else revision, hub.license, sides)


def _is_commit(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{40}", text) is not None


def _reachable(endpoint: str) -> bool:
    try:
        socket.getaddrinfo(urlparse(endpoint).hostname, 443)
    except OSError:
        return False
    return True
