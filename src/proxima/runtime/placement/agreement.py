"""Checks before any weights are loaded that all ranks run the same thing, and that each node has what it needs."""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from proxima import __version__
from proxima.config.comparable import flat_values
from proxima.config.scalars import in_one_line
from proxima.data import UserError
from proxima.system.environment import package_version
from proxima.train.ranks import Ranks

MIB = 2**20
LEAST_SHARED = {"cpu": 1 * MIB, "cuda": 32 * MIB}  # bytes of /dev/shm for each rank of a node, for NCCL's buffers
LEAST_DISK = 64 * MIB  # of the folder for temporary files
OWN = ("folder", "monitor", "view")  # fields that rank 0 alone uses
OF_NODE = "ranks on its node"
REMEDIES = {
    **dict.fromkeys(("proxima", "torch", "transformers", "python"), "install the same version on all nodes"),
    "WORLD_SIZE": "start all ranks with one launcher",
    "device": "give every rank a device of one kind, or set model.device",
    OF_NODE: "placement.sharding=hybrid needs as many on every node; or set placement.sharding=full",
}  # of a difference; of one in any other field, which is one of the config:
ONE_RECIPE = "start every rank with one command line, and one recipe"
COPY = "copy the files of rank 0's node there, or use a shared file system"


def rank_facts(config: Any) -> dict[str, Any]:
    """This rank's facts: `same` has those that must agree between ranks; the others are about its node."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    same: dict[str, Any] = {"proxima": __version__, "python": platform.python_version()}
    same |= {name: package_version(name) for name in ("torch", "transformers")}
    same |= {"WORLD_SIZE": int(os.environ["WORLD_SIZE"]), "device": device}
    same |= {path: value for path, value in flat_values(config).items() if path.split(".")[0] not in OWN}
    if same.get("placement.sharding.kind") == "hybrid":
        same[OF_NODE] = ranks_of_node
    shared, disk = _free_bytes("/dev/shm"), _free_bytes(tempfile.gettempdir())
    return {"same": same, "least_shared": LEAST_SHARED[device] * ranks_of_node, "shared_memory": shared, "disk": disk}


def _free_bytes(folder: str) -> int | None:
    """Free bytes of a folder's file system; None if the folder is missing."""
    with suppress(OSError):
        return shutil.disk_usage(folder).free
    return None


def compare_facts(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the facts of all ranks, by name (`rank 2 on HOST`), rank 0 first.

    Raises:
        UserError: names the first rank that differs or lacks something, both values and the remedy.
    """
    first = next(iter(facts))
    for name, node in facts.items():
        ours = facts[first]["same"]
        for field in dict.fromkeys([*ours, *node["same"]]):
            _same(name, first, field, node["same"].get(field), ours.get(field), REMEDIES.get(field, ONE_RECIPE))
        least, shared, disk = node["least_shared"], node["shared_memory"], node["disk"]
        if shared is not None and shared < least:
            text = f"{name}: /dev/shm has {shared / MIB:,.1f} MiB free, and its node needs {least / MIB:,.0f}"
            remedy = "start its container with a larger one (docker run --shm-size=8g), or empty it"
            raise UserError(text, remedy=remedy)
        if disk is not None and disk < LEAST_DISK:
            folder = tempfile.gettempdir()
            text = f"{name}: {folder} has {disk / MIB:,.1f} MiB free, and {LEAST_DISK / MIB:,.0f} are needed"
            raise UserError(text, remedy="free some space there, or set TMPDIR on that node")


def agree_on_files(hashes: Callable[[], Mapping[str, str]], ranks: Ranks) -> None:
    """Check that every node reads the same files. Collective.

    Args:
        hashes: called on the first rank of each node.

    Raises:
        UserError: on rank 0; names rank, file and both hashes. The others raise Refused.
    """
    gathered = ranks.gather(hashes() if os.environ.get("LOCAL_RANK", "0") == "0" else None)
    problem = None
    try:
        compare_files({ranks.name(rank): hashed for rank, hashed in enumerate(gathered)})
    except UserError as error:
        problem = error
    ranks.agree(problem)


def compare_files(hashes: Mapping[str, Mapping[str, str] | None]) -> None:
    """Compare the hashes of the files that the ranks read, by the rank's name, rank 0 first; None: another rank of its
    node has sent them.

    Raises:
        UserError: names rank, file and both hashes.
    """
    first = next(iter(hashes))
    ours = hashes[first] or {}
    for name, node in hashes.items():
        for file in () if node is None else dict.fromkeys([*ours, *node]):
            there, here = (hashed.get(file, "no such file")[:12] for hashed in (node or {}, ours))
            _same(name, first, file, there, here, COPY)


def _same(name: str, first: str, field: str, value: Any, expected: Any, remedy: str) -> None:
    if value != expected:
        shown, ours = (in_one_line(part) for part in (value, expected))
        raise UserError(f"{name} differs from {first} in {field}: {shown} there, {ours} here", remedy=remedy)
