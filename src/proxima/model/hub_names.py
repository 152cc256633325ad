"""Names of the Hugging Face hub: which paths may be one, and hints and errors where the hub can't be reached."""

import os
import socket
from pathlib import Path
from urllib.parse import urlparse

from proxima.data import FieldError
from proxima.data.errors import nearest
from proxima.model.files import local_place

# folder names with which no name on the hub begins
LOCAL_FOLDERS = (
    "ckpt",
    "checkpoints",
    "data",
    "exported",
    "model",
    "models",
    "out",
    "output",
    "outputs",
    "runs",
    "tmp",
)


def looks_like_hub_name(path: str) -> bool:
    """True if `path` has the form owner/name and its owner is not a local folder, or if it is at hand."""
    owner, slash, name = path.partition("/")
    if not (slash and owner and name) or "/" in name or " " in path or path.endswith(".gguf"):
        return False
    if owner in LOCAL_FOLDERS or owner.startswith((".", "~")):
        return False
    return not Path(owner).exists() or is_at_hand(path, None)


def require_hub_name(path: str) -> None:
    """Raise `FieldError` for a path that does not exist and can't be a name on the hub."""
    if looks_like_hub_name(path):
        return
    place = Path(path).expanduser()
    where = "" if place.is_absolute() else ": a path is relative to the current folder"
    near, there = did_you_mean(place), two_readings(path)
    remedy = f"{near}give a folder, a .gguf file, or a hub name like Qwen/Qwen3-0.6B{there}"
    raise FieldError("model.path", path, f"does not exist{where}", remedy=remedy)


def two_readings(path: str) -> str:
    """A hint for a path whose first part is a local folder: how to use the model of that name on the hub instead."""
    owner, _, name = path.partition("/")
    if not owner or not Path(owner).is_dir() or not name or "/" in name or owner.startswith((".", "~")):
        return ""
    return f"; if it is a name of the hub, download it first (hf download {path}): there is a folder {owner!r} here"


def require_found(path: str, revision: str | None) -> None:
    """Raise `FieldError` for a name that is not a path, is not in the cache, and can't be looked up: immediately,
    whereas the libraries would retry for half a minute."""
    if is_at_hand(path, revision) or (why := unreachable()) is None:
        return
    hint = did_you_mean(Path(path))
    what = f"is not a folder here, is not in the hub's cache, and the hub can't be asked: {why}"
    raise FieldError(
        "model.path", path, what, remedy=f"{hint}give an existing folder, or run hf download {path} online"
    )


def is_at_hand(path: str, revision: str | None) -> bool:
    """True if the model's config can be read without contacting the hub."""
    return local_place(path, revision) is not None


def did_you_mean(place: Path) -> str:
    """The hint `did you mean models/m? Else ` for a path that does not exist, if its first part that is missing is
    misspelt; empty if nothing is similar."""
    folder = next(parent for parent in place.parents if os.path.isdir(parent))
    part, *rest = place.relative_to(folder).parts
    near = nearest(part, (child.name for child in folder.glob("*") if os.path.exists(child.joinpath(*rest))))
    if near is None:
        return ""
    found = folder.joinpath(near, *rest)
    shown = os.path.relpath(found)
    return f"did you mean {os.path.normpath(found) if shown.startswith('..') and place.is_absolute() else shown}? Else "


def unreachable() -> str | None:
    """Describe why the hub can't be reached; None if it can."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    return None if hub_is_reachable() else f"{urlparse(constants.ENDPOINT).hostname} has no address"


def hub_is_reachable() -> bool:
    """True if the hub's host name resolves."""
    from huggingface_hub import constants

    try:
        socket.getaddrinfo(urlparse(constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True
