"""Weight sync to servers through a folder that all of them read; a probe verifies each server.

The folder is a Hugging Face folder. It does not outlive its process for long: the next process removes what a killed
one has left.
"""

import asyncio
import fcntl
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from proxima.data import UserError
from proxima.data.columns import Floats
from proxima.data.json_reader import load_json
from proxima.engine.http.dialect import WeightHandover, WrittenTokens
from proxima.engine.http.replica import Replica
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weight_probe import (
    Bound,
    bound_of,
    check_distance,
    first_compared,
    perturbed,
    probe_tokens,
    rounding,
    trainer_log_prob,
)
from proxima.engine.process.shared_weights import model_as_files, unique_weights
from proxima.engine.protocol import EngineSetup, ServerError, WeightUpdate
from proxima.model.images.image_store import image_store
from proxima.system.atomic_files import ordinary_modes

INDEX = "model.safetensors.index.json"
SHARD = 1 << 28  # bytes of weights per file: a server is given one after the other, and a copy is made of one at a time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
SHARED_MEMORY = Path("/dev/shm")
KEPT = 2  # the folder that servers have loaded, and the one that they are loading
ROOM = 1.2  # factor of free memory required for each folder
PREFIX = "proxima-weights-"
LOCK_FILE = ".held"  # a file kept locked by the process that created the folder
BOOT = Path("/proc/sys/kernel/random/boot_id")  # unique to each boot of a Linux kernel
T = TypeVar("T")
Report = dict[str, float]  # of a sync to one replica: `seconds`, `bytes`, `probe_mean` and `probe_max` (nats), …


@dataclass(frozen=True)
class StagedWeights:
    """Weights that servers can read, and the trainer's log-probs under them.

    Args:
        handover: their folder, with the servers' name for them.
        expected: [T] log-probs of the probe's tokens.
        rounding: how far bfloat16 moves these log-probs; None: not computed.
    """

    handover: WeightHandover
    expected: Floats
    rounding: Bound | None = None


class WeightFolders:
    """Versions of a model's weights, each a complete folder: config, tokenizer, safetensors. The two newest are kept,
    so that a server that is still reading one finds it.

    Args:
        root: the folders are written to a dedicated folder in it, which is created. None: in memory if there is room,
            else among the temporary files. `close` removes everything written; leftovers of killed processes are
            removed before the first write.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = None if root is None else root.resolve()
        self._locked: LockedFolder | None = None
        self.kept = list[Path]()  # the existing folders, newest last
        self._closed = False

    def write(self, model: nn.Module, tokenizer: Any, name: str, dtype: str | None = None) -> Path:
        """Write the model's weights, with adapters merged and tied ones once.

        Args:
            name: name of the folder, which no other version has had.
            dtype: of the written weights, by the servers' name: `bfloat16` and the like; None: unchanged.

        Returns: the absolute path of the folder.

        Raises:
            UserError: it can't be written, for example for lack of space, or for a dtype that is not supported.
        """
        if dtype is not None and dtype not in DTYPES:
            raise UserError(f"weights can't be written as {dtype!r}", remedy=f"use {', '.join(DTYPES)}")
        written_as = None if dtype is None else DTYPES[dtype]
        size = sum(weight.numel() * _written(weight, written_as).itemsize for weight in model.parameters())
        folder: Path | None = None
        try:
            folder = self._place(size) / name
            folder.mkdir()
            for file, content in model_as_files(model, tokenizer).items():
                (folder / file).write_bytes(content)
            _write_weights(model, folder, written_as)
            ordinary_modes(folder)  # the server may run as another user
        except (OSError, SafetensorError) as error:
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            destination = self._root if folder is None else folder.parent
            where = "" if destination is None else f" to {destination}"
            reason = error.strerror or error if isinstance(error, OSError) else error
            remedy = "set engine.weight_folder to a folder with more room that the server can read"
            raise UserError(f"weights could not be written{where}: {reason}", remedy=remedy) from error
        finally:
            if self._closed:  # by another thread, meanwhile
                self.close()
        self.kept.append(folder)
        while len(self.kept) > KEPT:
            shutil.rmtree(self.kept.pop(0), ignore_errors=True)
        return folder

    def close(self) -> None:
        """Remove everything written, including what a write in progress has left when it ends."""
        self._closed = True
        self.kept.clear()
        if self._locked is not None:
            self._locked.remove()

    def _place(self, size: int) -> Path:
        if self._locked is None and self._root is not None:
            self._root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._root, shared=True)
            self._locked = LockedFolder(self._root, shared=True)
        elif self._locked is None:
            disk = Path(tempfile.gettempdir())
            for parent in (SHARED_MEMORY, disk):
                remove_leftovers(parent)
            memory = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM * (KEPT + 1) * size
            self._locked = LockedFolder(SHARED_MEMORY if memory else disk)
        return self._locked.path


class FolderSync:
    """Sends each replica its weights, and verifies that they arrived. Called from the engine's own loop.

    The trainer's weights are written once, and each replica reads them.

    Before its first weights, and before the first ones after a restart, a server gets a perturbed copy. It already has
    the initial weights, so a part of the model that it fails to load would go unnoticed for a long time: the first real
    weights hardly differ. The copy is made once, from the first weights, and kept until `close`: servers may return at
    any moment, when the trainer's model may be in the middle of an update.
    """

    def __init__(self, spec: ServerSettings, setup: EngineSetup) -> None:
        self.spec, self.setup = spec, setup
        root = None if spec.weight_folder is None else Path(spec.weight_folder).expanduser()
        self._folders, self._perturbed_folders = WeightFolders(root), WeightFolders(root)
        self._tokens = probe_tokens(setup.tokenizer, spec.probe_tokens, setup.max_length)
        self._images = image_store(setup.tokenizer)
        self._shown = WrittenTokens.of(self._tokens, setup.tokenizer)
        self._staged: StagedWeights | None = None
        self._perturbed: StagedWeights | None = None
        self._proven = set[str]()  # URLs of replicas that loaded the perturbed copy and still have one of our labels
        self._labels = set[str]()

    async def prepare(self, update: WeightUpdate, label: str, dtype: str | None) -> None:
        """Write the weights, and compute the log-probs that the probe expects.

        Args:
            dtype: of the servers; None: not reported.
        """
        module = update.module
        self._staged = await self._compute(self._write, module, update.version, label, dtype)
        if self._perturbed is None:
            name = f"{label}-perturbed"
            self._perturbed = await self._compute(self._write_perturbed, module, update.version, name)

    async def push(self, replica: Replica) -> Report:
        """Load the weights, reset the prefix cache, resume and probe; for a new server, first with the perturbed copy.
        The replica is paused and keeps its completions, if any; on return the server may be paused or not.

        Raises:
            ServerError: a call failed; the replica is ejected, and gets the weights before it returns.
            UserError: it does not compute with them; the replica is ejected too, and the run ends if no other has them.
        """
        staged, start = self._staged, monotonic()
        assert staged is not None
        metrics = Report()
        copy = self._perturbed if await self._is_new(replica) else None
        try:
            if copy is not None:
                metrics |= await self._prove(replica, copy)
                await replica.dialect.pause(replica.client, replica.facts, "keep")
            await self._load_weights(replica, staged)
        except BaseException:
            if copy is not None:
                await self._undo(replica, staged)
            raise
        scores = await self._score(replica)
        try:
            bound = bound_of(replica.facts, self.spec.probe_bound)
            version = f"version {staged.handover.version}"
            metrics |= check_distance(replica.url, version, staged.expected, scores, bound)
        except UserError:
            self._proven.discard(replica.url)  # it must pass the perturbed copy again before it returns
            raise
        return metrics | {"bytes": folder_bytes(staged.handover.folder), "seconds": monotonic() - start}

    async def close(self) -> None:
        """Remove the folders."""
        self._folders.close()
        self._perturbed_folders.close()

    async def _is_new(self, replica: Replica) -> bool:
        """Return True if the server does not have our weights, for example after a restart."""
        if replica.url not in self._proven:
            return True
        health = await replica.dialect.health(replica.client, replica.facts)
        is_ours = health.weight_version is None or health.weight_version in self._labels
        if not is_ours:
            self._proven.discard(replica.url)
        return not is_ours

    async def _prove(self, replica: Replica, copy: StagedWeights) -> Report:
        """Load the perturbed copy, and verify that the server computes with all of it."""
        await self._load_weights(replica, copy)
        scores = await self._score(replica)
        bound = bound_of(replica.facts, self.spec.probe_bound, copy_rounding=copy.rounding)
        metrics = check_distance(replica.url, "the perturbed copy", copy.expected, scores, bound)
        self._proven.add(replica.url)
        return {f"perturbed_{name.removeprefix('probe_')}": value for name, value in metrics.items()}

    async def _undo(self, replica: Replica, staged: StagedWeights) -> None:
        """Remove the perturbed copy from a server that others may use: it gets the real weights, or stays paused."""
        self._proven.discard(replica.url)
        with suppress(ServerError, UserError):
            await replica.dialect.pause(replica.client, replica.facts, "keep")
            try:
                await self._load_weights(replica, staged)
            except (ServerError, UserError):
                await replica.dialect.pause(replica.client, replica.facts, "keep")

    async def _load_weights(self, replica: Replica, weights: StagedWeights) -> None:
        """Load weights, reset the prefix cache, and resume the server: a paused one answers no probe."""
        dialect, client, facts = replica.dialect, replica.client, replica.facts
        await dialect.load_weights(client, facts, weights.handover)
        self._labels.add(weights.handover.label)
        interrupt = self.spec.interrupt
        if interrupt != "keep" or not facts.keeps_kv:  # kept completions keep their cache, which has another salt
            await dialect.reset_prefix_cache(client, facts, running=interrupt == "recompute")
        if self._images is not None:
            await dialect.forget_images(client, facts)
        await dialect.resume(client, facts)

    async def _score(self, replica: Replica) -> Floats:
        first = first_compared(self._tokens)
        return await replica.dialect.score(replica.client, replica.facts, self._shown, first)

    async def _compute(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run work in the thread for tensor work, between the trainer's updates."""
        if self.setup.compute is not None:
            return await self.setup.compute.run(work, *arguments)
        return await asyncio.to_thread(work, *arguments)

    def _write(self, module: nn.Module, version: int, label: str, dtype: str | None) -> StagedWeights:
        handover = self._write_folder(self._folders, module, version, label, dtype)
        return StagedWeights(handover, trainer_log_prob(module, self._tokens, images=self._images))

    def _write_folder(
        self, folders: WeightFolders, module: nn.Module, version: int, label: str, dtype: str | None = None
    ) -> WeightHandover:
        folder = folders.write(module, self.setup.tokenizer, label, dtype)
        return WeightHandover(version=version, label=label, folder=folder, seconds=self.spec.weight_seconds)

    def _write_perturbed(self, module: nn.Module, version: int, label: str) -> StagedWeights:
        with perturbed(module, self._tokens, self._images):
            handover = self._write_folder(self._perturbed_folders, module, version, label)
            expected = trainer_log_prob(module, self._tokens, images=self._images)
            bound = rounding(module, self._tokens, expected, self._images)
        return StagedWeights(handover, expected, rounding=bound)


def sync_figures(reports: Sequence[Report]) -> dict[str, float]:
    """Combine the figures of several replicas: the largest of each, and the number of replicas. Empty without
    reports."""
    names = {name for report in reports for name in report}
    figures = {name: max(report[name] for report in reports if name in report) for name in names}
    return figures | {"replicas": len(reports)} if reports else {}


def _write_weights(model: nn.Module, folder: Path, dtype: torch.dtype | None) -> None:
    total, weight_map = 0, dict[str, str]()
    for number, shard in enumerate(_shards(model, dtype), 1):
        file = f"model-{number:05}.safetensors"  # servers read them in this order
        save_file(shard, folder / file, metadata={"format": "pt"})
        total += sum(weight.nbytes for weight in shard.values())
        weight_map |= dict.fromkeys(shard, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def _shards(model: nn.Module, dtype: torch.dtype | None) -> Iterator[dict[str, Tensor]]:
    """Yield the weights to be written, one file's at a time; the dict is reused for the next file."""
    shard, filled = dict[str, Tensor](), 0
    for (name, *_), weight in unique_weights(model):
        copy = weight.detach().to("cpu", _written(weight, dtype)).contiguous()
        if shard and filled + copy.nbytes > SHARD:
            yield shard
            shard.clear()
            filled = 0
        shard[name] = copy
        filled += copy.nbytes
    yield shard


def _written(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype in which a weight is written."""
    return weight.dtype if dtype is None or not weight.is_floating_point() else dtype


def folder_bytes(folder: Path) -> int:
    """Bytes of the weights in a folder."""
    return int(load_json((folder / INDEX).read_text())["metadata"]["total_size"])


class LockedFolder:
    """A temporary folder, created at once. The operating system releases its lock when the process ends, however it
    ends; an unlocked folder is a leftover.

    Args:
        parent: the folder in which it is created.
        shared: the parent is shared with other users and machines: its permissions decide who may read the folder, and
            the lock is valid only among processes of this kernel, whose id is in the lock file.
    """

    def __init__(self, parent: Path, *, shared: bool = False) -> None:
        self.path = parent / f"{PREFIX}{secrets.token_hex(8)}"
        self.path.mkdir(0o777 if shared else 0o700)
        self._file = _lock(self.path, may_fail=shared)
        self._file.write(_kernel())
        self._file.flush()

    def remove(self) -> None:
        """Remove the folder and its contents. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()


def _lock(folder: Path, *, may_fail: bool) -> IO[bytes]:
    """Create the lock file of a folder. It is locked before it has its name, lest another process take it for a
    leftover.

    Args:
        may_fail: a file system without locks is not an error: there no process can mistake it for a leftover.
    """
    file = (folder / f"{LOCK_FILE}.{os.getpid()}").open("xb")
    with suppress(OSError) if may_fail else nullcontext():
        fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(file.name, folder / LOCK_FILE)
    return file


def _kernel() -> bytes:
    """The boot id of the running kernel; empty if unavailable."""
    with suppress(OSError):
        return BOOT.read_bytes().strip()
    return b""


def remove_leftovers(parent: Path, *, shared: bool = False) -> None:
    """Remove the folders of processes that have ended.

    Args:
        shared: the parent is shared with other machines, whose locks may be invisible here: remove only folders created
            under this kernel.
    """
    for file in parent.glob(f"{PREFIX}*/{LOCK_FILE}"):
        try:
            with file.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if shared and (not _kernel() or lock.read() != _kernel()):
                    continue
                shutil.rmtree(file.parent, ignore_errors=True)
        except OSError:  # it is locked, owned by another user, or gone
            continue
