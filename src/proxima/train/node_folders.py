"""Copies a folder of the first rank's node to all other nodes of a run: sent once per node, written by its first rank.

So servers on all nodes read new weights from a local path, regardless of their writer and format.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from proxima.data import UserError
from proxima.engine.http.locked_folder import PREFIX, LockedFolder, remove_leftovers
from proxima.train.messages import Copy
from proxima.train.ranks import Ranks

CHUNK = 1 << 26  # bytes sent at once


class NodeFolders:
    """The folders of one rank; rank 0 calls `send`, and the others answer with `follow`. `close` removes everything
    that this rank has written; the next run on the node removes the leftovers of a killed one."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._roots: dict[Path, LockedFolder] = {}
        self._groups: dict[tuple[int, ...], Any] = {}

    def send(self, folder: Path, kept: Sequence[Path]) -> None:
        """Copy a folder of files to all nodes that do not see it. It appears there atomically, under the same path.

        Raises:
            UserError: a node can't write it.
        """
        message = Copy(folder, tuple(path.name for path in kept))
        with self.ranks.call(message):
            problems = [problem for problem in self.follow(message) if problem]
        if problems:
            remedy = "set engine.weight_folder to a folder with more room, or one that all nodes share"
            raise UserError(f"weights could not be written: {problems[0]}", remedy=remedy)

    def follow(self, copy: Copy) -> list[str]:
        """Receive a folder if this rank is the first of a node that lacks it; collective. Returns, on rank 0, the
        problem of each rank."""
        first = os.environ.get("LOCAL_RANK", "0") == "0"  # without the variable all are; the first to finish wins
        lacking = self.ranks.gather_everywhere(first and not copy.path.exists())
        members = (0, *(rank for rank, lacks in enumerate(lacking) if lacks))
        problem = ""
        if len(members) > 1:
            if members not in self._groups:
                self._groups[members] = dist.new_group(list(members), backend="gloo")
            group = self._groups[members]
            if self.ranks.rank == 0:
                send_files(copy.path, group)
            elif self.ranks.rank in members:
                problem = self._take(copy, group)
        return self.ranks.gather(problem)

    def _take(self, copy: Copy, group: Any) -> str:
        root, problem = copy.path.parent, ""
        aside = root / f".{copy.path.name}.{self.ranks.rank}"
        try:
            if root not in self._roots:
                self._roots[root] = _root(root)
            aside.mkdir()
        except OSError as error:
            problem = _describe(root, error)
        problem = receive_files(None if problem else aside, group) or problem
        if not problem:
            with suppress(OSError):  # another rank of this node was faster
                os.rename(aside, copy.path)
        shutil.rmtree(aside, ignore_errors=True)
        for path in root.iterdir() if root.is_dir() else ():
            if path.is_dir() and not path.name.startswith(".") and path.name not in (copy.path.name, *copy.kept):
                shutil.rmtree(path, ignore_errors=True)
        return problem

    def close(self) -> None:
        """Remove the folders that were received."""
        for root in self._roots.values():
            root.remove()


def _root(path: Path) -> LockedFolder:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.startswith(PREFIX):
        remove_leftovers(path.parent)
    return LockedFolder(path.parent, name=path.name)


def send_files(folder: Path, group: Any) -> None:
    """Send the files of a folder to the other ranks of a group that contains rank 0."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    sizes = [[(path.name, path.stat().st_size) for path in files]]
    dist.broadcast_object_list(sizes, src=0, group=group)
    buffer = torch.empty(CHUNK, dtype=torch.uint8)
    for path, (_, size) in zip(files, sizes[0], strict=True):
        with path.open("rb", buffering=0) as stream:
            for start in range(0, size, CHUNK):
                chunk = buffer[: min(CHUNK, size - start)]
                view, filled = chunk.numpy().data, 0
                while filled < len(view):
                    count = stream.readinto(view[filled:])
                    if not count:
                        raise OSError(f"{path} has become shorter")
                    filled += count
                dist.broadcast(chunk, src=0, group=group)


def receive_files(folder: Path | None, group: Any) -> str:
    """Receive everything that `send_files` sends, even if it can't be written; return the reason, or an empty string.

    Args:
        folder: empty; None: nothing is written.
    """
    sizes: list[Any] = [None]
    dist.broadcast_object_list(sizes, src=0, group=group)
    buffer, problem = torch.empty(CHUNK, dtype=torch.uint8), ""
    for name, size in sizes[0]:
        with open(os.devnull if folder is None else folder / name, "wb", buffering=0) as stream:
            for start in range(0, size, CHUNK):
                chunk = buffer[: min(CHUNK, size - start)]
                dist.broadcast(chunk, src=0, group=group)
                try:
                    view = chunk.numpy().data
                    while not problem and len(view):
                        view = view[stream.write(view) :]
                except OSError as error:
                    problem = _describe(folder, error)
    return problem


def _describe(place: Path | None, error: OSError) -> str:
    return f"{os.uname().nodename}: {place}: {error.strerror or error}"
