"""Checks before any weights are loaded that all ranks run the same thing, and that each node has what it needs."""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from proxima.config.comparable import flat_values
from proxima.config.scalars import in_one_line
from proxima.data import UserError
from proxima.system.machine import package_version
from proxima.training.ranks import Ranks
from proxima.version import __version__

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
    """This rank's facts: `same` must agree between ranks, `lack` is what its node lacks."""
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    ranks_of_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    same: dict[str, Any] = {"proxima": __version__, "python": platform.python_version()}
    same |= {name: package_version(name) for name in ("torch", "transformers")}
    same |= {"WORLD_SIZE": int(os.environ["WORLD_SIZE"]), "device": device}
    same |= {path: value for path, value in flat_values(config).items() if path.split(".")[0] not in OWN}
    if same.get("placement.sharding.kind") == "hybrid":
        same[OF_NODE] = ranks_of_node
    return {"same": same, "lack": lack_of_space(LEAST_SHARED[device] * ranks_of_node)}


def lack_of_space(shared: int) -> str:
    """What this node lacks, and the remedy, if it needs that many bytes of shared memory; empty if it has all."""
    bigger = "start its container with a larger one (docker run --shm-size=8g), or empty it"
    disk = (tempfile.gettempdir(), LEAST_DISK, "free some space there, or set TMPDIR on that node")
    for folder, least, remedy in (("/dev/shm", shared, bigger), disk):
        if os.path.isdir(folder) and (free := shutil.disk_usage(folder).free) < least:
            return f"{folder} has {free / MIB:,.1f} MiB free, and its node needs {least / MIB:,.0f}; {remedy}"
    return ""


def compare_facts(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the facts of all ranks, by name (`rank 2 on HOST`), rank 0 first.

    Raises:
        UserError: names the first rank that differs or lacks something, both values and the remedy.
    """
    if (problem := conflict({name: node["same"] for name, node in facts.items()}, REMEDIES, ONE_RECIPE)) is not None:
        raise problem
    for name, node in facts.items():
        if node["lack"]:
            raise UserError(f"{name}: {node['lack']}")


def agree_on_files(hashes: Callable[[], Mapping[str, str]], ranks: Ranks) -> None:
    """Check that every node reads the same files. Collective.

    Args:
        hashes: called on the first rank of each node.

    Raises:
        UserError: on rank 0; names rank, file and both hashes. The others raise Refused.
    """
    reads = os.environ.get("LOCAL_RANK", "0") == "0"
    gathered = ranks.gather({file: whole[:12] for file, whole in hashes().items()} if reads else None)
    hashed = {ranks.name(rank): files for rank, files in enumerate(gathered) if files is not None}
    ranks.agree(conflict(hashed, {}, COPY))


def conflict(values: Mapping[str, Mapping[str, Any]], remedies: Mapping[str, str], remedy: str) -> UserError | None:
    """The error about the first rank whose values differ from those of the first one: the field, both values, and the
    field's remedy, or `remedy`; None if all are the same."""
    first = next(iter(values), "")
    for name, theirs in values.items():
        for field in dict.fromkeys([*values[first], *theirs]):
            there, here = (fields.get(field, "missing") for fields in (theirs, values[first]))
            if there != here:
                shown = f"{in_one_line(there)} there, {in_one_line(here)} here"
                what = f"{name} differs from {first} in {field}: {shown}"
                return UserError(what, remedy=remedies.get(field, remedy))
    return None
