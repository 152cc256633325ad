"""Checks before any weights are loaded that all ranks run the same thing, and that each node has what it needs."""

import os
import platform
import shutil
import tempfile
from collections.abc import Mapping
from typing import Any

from proxima import __version__
from proxima.config.comparable import flat_values
from proxima.config.scalars import in_one_line
from proxima.data import UserError
from proxima.runtime.watch.environment import package_version

VERSIONS = ("proxima", "torch", "transformers", "python")
MIB = 2**20
LEAST_SHARED = {"cpu": 1 * MIB, "cuda": 32 * MIB}  # bytes of /dev/shm for each rank of a node, for NCCL's buffers
LEAST_DISK = 64 * MIB  # of the folder for temporary files
OWN = ("folder", "monitor", "view")  # fields that rank 0 alone uses


def rank_facts(config: Any, device: str) -> dict[str, Any]:
    """This rank's facts: those that must agree between ranks, and the resources of its node."""
    packages: dict[str, str | None] = {"proxima": __version__, "python": platform.python_version()}
    packages |= {name: package_version(name) for name in ("torch", "transformers")}
    fields = {path: value for path, value in flat_values(config).items() if path.split(".")[0] not in OWN}
    return {
        "versions": packages,
        "ranks": int(os.environ["WORLD_SIZE"]),
        "ranks_of_node": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "first_of_node": os.environ.get("LOCAL_RANK", "0") == "0",
        "device": device,
        "shared_memory": free_bytes("/dev/shm"),
        "disk": free_bytes(tempfile.gettempdir()),
        "config": fields,
    }


def free_bytes(folder: str) -> int | None:
    """Free bytes of a folder's file system; None if the folder is missing."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def compare_facts(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare the facts of all ranks, by name (`rank 2 on HOST`), rank 0 first.

    Raises:
        UserError: names the first rank that differs or lacks something, both values and the remedy.
    """
    first, *_ = facts
    for name, own in facts.items():
        for package in VERSIONS:
            _same(name, first, package, own["versions"][package], facts[first]["versions"][package],
                  "install the same version on all nodes")  # fmt: skip
        _same(name, first, "WORLD_SIZE", own["ranks"], facts[first]["ranks"], "start all ranks with one launcher")
        _same(name, first, "device", own["device"], facts[first]["device"],
              "give every rank a device of one kind, or set model.device")  # fmt: skip
        hers, ours = own["config"], facts[first]["config"]
        for path in dict.fromkeys([*ours, *hers]):
            _same(name, first, path, hers.get(path), ours.get(path),
                  "start every rank with one command line, and one recipe")  # fmt: skip
        _has_room(name, own)
    if facts[first]["config"].get("placement.sharding.kind") == "hybrid":
        for name, own in facts.items():
            remedy = "placement.sharding=hybrid needs as many on every node; or set placement.sharding=full"
            _same(name, first, "ranks on its node", own["ranks_of_node"], facts[first]["ranks_of_node"], remedy)


def _has_room(name: str, own: Mapping[str, Any]) -> None:
    least = LEAST_SHARED[own["device"]] * own["ranks_of_node"]
    shared, disk = own["shared_memory"], own["disk"]
    if shared is not None and shared < least:
        text = f"{name}: /dev/shm has {shared / MIB:,.1f} MiB free, and its node needs {least / MIB:,.0f}"
        raise UserError(text, remedy="start its container with a larger one (docker run --shm-size=8g), or empty it")
    if disk is not None and disk < LEAST_DISK:
        folder = tempfile.gettempdir()
        text = f"{name}: {folder} has {disk / MIB:,.1f} MiB free, and {LEAST_DISK / MIB:,.0f} are needed"
        raise UserError(text, remedy="free some space there, or set TMPDIR on that node")


def compare_files(hashes: Mapping[str, Mapping[str, str] | None]) -> None:
    """Compare the hashes of the files that the ranks read, by the rank's name, rank 0 first; None: another rank of its
    node has sent them.

    Raises:
        UserError: names rank, file and both hashes.
    """
    first, *others = hashes
    ours = hashes[first] or {}
    for name in others:
        if (hers := hashes[name]) is None:
            continue
        for file in dict.fromkeys([*ours, *hers]):
            value, expected = (hashed.get(file, "no such file")[:12] for hashed in (hers, ours))
            remedy = "copy the files of rank 0's node there, or use a shared file system"
            _same(name, first, file, value, expected, remedy)


def _same(name: str, first: str, field: str, value: Any, expected: Any, remedy: str) -> None:
    if value != expected:
        shown, ours = (in_one_line(part) for part in (value, expected))
        raise UserError(f"{name} differs from {first} in {field}: {shown} there, {ours} here", remedy=remedy)
