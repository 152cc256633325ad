"""Sends weights through Hugging Face folders that servers read by themselves: where they have no network in common with
the trainer, and on CPUs, where it is fastest.

`StagedTransport` is what this shares with the transport of adapters: copies that outlive an optimizer step. The next
process removes the copies that a killed process has left.
"""

import json
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from proxima.data import UserError
from proxima.data.json_reader import load_json
from proxima.engine.http.dialect import WeightsInFolder
from proxima.engine.http.replica import Replica
from proxima.engine.http.server_settings import ServerSettings
from proxima.engine.http.weights.buckets import named_weights, written_dtype
from proxima.engine.http.weights.transport import UNSEEN, PushRound, Receivers, WeightTransport
from proxima.engine.protocol import EngineSetup, WeightUpdate
from proxima.model.input_files import copy_tensors, input_files_of, stored_tensors
from proxima.model.written_settings import save_settings
from proxima.system.atomic_files import ordinary_modes
from proxima.system.linux import SHARED_MEMORY, kernel_id, lock
from proxima.system.locks import open_regular

INDEX = "model.safetensors.index.json"
UNUSED = "model-unused.safetensors"
SHARD = 1 << 28  # bytes of weights per file: a server is given one after the other, and a copy is made of one at a time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KEPT = 2  # the folder that servers have loaded, and the one that they are loading
ROOM = 1.2  # factor of free memory required for each folder
PREFIX = "proxima-weights-"
LOCK_FILE = ".held"  # a file kept locked by the process that created the folder
KERNEL_BYTES = 100  # more is no kernel's id


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
        size = self._size(model, written_as)
        folder: Path | None = None
        try:
            folder = self._place(size) / name
            while len(self.kept) >= KEPT:  # before the new one takes room
                shutil.rmtree(self.kept.pop(0), ignore_errors=True)
            folder.mkdir()
            self._fill(model, tokenizer, folder, written_as)
            ordinary_modes(folder)  # the server may run as another user
        except (OSError, SafetensorError) as error:
            destination = self._root
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
                destination = folder.parent
            raise _not_written(destination, error) from error
        finally:
            if self._closed:  # by another thread, meanwhile
                self.close()
        self.kept.append(folder)
        return folder

    def _size(self, model: nn.Module, dtype: torch.dtype | None) -> int:
        """Bytes of the weights that `_fill` writes."""
        size = sum(weight.numel() * written_dtype(weight, dtype).itemsize for weight in model.parameters())
        files = input_files_of(model)
        if files is not None:
            size += sum(tensor.size for tensor in files.unused.values())
        return size

    def _fill(self, model: nn.Module, tokenizer: Any, folder: Path, dtype: torch.dtype | None) -> None:
        save_settings(model, tokenizer, folder)
        unused = _unused_weights(model, folder.parent)
        _write_weights(model, folder, dtype, unused)

    def close(self) -> None:
        """Remove everything written, including what a write in progress has left when it ends."""
        self._closed = True
        self.kept.clear()
        if self._locked is not None:
            self._locked.remove()

    def _place(self, size: int) -> Path:
        if self._locked is not None:
            return self._locked.path
        if self._root is not None:
            self._root.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._root, shared=True)
            self._locked = LockedFolder(self._root, shared=True)
            return self._locked.path
        place = Path(tempfile.gettempdir())
        for parent in (SHARED_MEMORY, place):
            remove_leftovers(parent)
        if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > ROOM * (KEPT + 1) * size:
            place = SHARED_MEMORY
        self._locked = LockedFolder(place)
        return self._locked.path


def _not_written(destination: Path | None, error: OSError | SafetensorError) -> UserError:
    """The error for weights that can't be written to a folder; None: it was not reached."""
    where = "" if destination is None else f" to {destination}"
    reason: object = error
    if isinstance(error, OSError):
        reason = error.strerror or error
    remedy = "set engine.weight_folder to a folder with more room that the server can read"
    return UserError(f"weights could not be written{where}: {reason}", remedy=remedy)


class StagedTransport(WeightTransport):
    """The part that transports with copies share: `prepare` writes a folder, and `close` removes all of them. The two
    newest are kept, and the perturbed copy apart from them. A subclass adds `push` and what `auto` asks."""

    folders: type[WeightFolders] = WeightFolders

    def __init__(self, spec: ServerSettings, setup: EngineSetup) -> None:
        self.spec = spec
        self.setup = setup
        root = None
        if spec.weight_folder is not None:
            root = Path(spec.weight_folder).expanduser()
        self._folders = self.folders(root)
        self._perturbed = self.folders(root)

    def prepare(
        self, update: WeightUpdate, label: str, dtype: str | None, amounts: Sequence[float] | None = None
    ) -> WeightsInFolder:
        """See `WeightTransport`. The copy outlives the next optimizer step: a server that returns is sent the newest
        weights while the trainer is in the middle of an update.

        Raises:
            UserError: the copy can't be written, see `WeightFolders.write`.
        """
        folders = self._folders if amounts is None else self._perturbed
        folder = folders.write(update.module, self.setup.tokenizer, label, dtype)
        return WeightsInFolder(
            version=update.version,
            label=label,
            folder=folder,
            seconds=self.spec.weight_seconds,
            size=self._written(folder),
        )

    def _written(self, folder: Path) -> int:
        return folder_bytes(folder)

    async def check(self, replicas: Sequence[Replica], update: WeightUpdate) -> None:
        """See `WeightTransport`. It always succeeds."""

    async def close(self) -> None:
        """Remove the copies."""
        self._folders.close()
        self._perturbed.close()


class FolderTransport(StagedTransport):
    """See `WeightTransport`. The weights are written once, and each server reads them by itself."""

    @classmethod
    def unreached(cls, servers: Receivers) -> str | None:
        """See `WeightTransport`. That they see `weight_folder` is found out when they load it."""
        if not servers.offer("folder"):
            return "is not offered by every server"
        if servers.read_our_files:
            return None
        return f"needs weight_folder: {UNSEEN}"

    @classmethod
    def cost(cls, servers: Receivers) -> float:
        """See `WeightTransport`: written and read, on a CPU from memory."""
        return 1.0 if servers.on_this_machine else 4.0

    @classmethod
    def reason(cls, servers: Receivers) -> str:
        if servers.on_this_machine:
            return "the servers are on this machine"
        return "not every server can join a group"

    async def push(self, replica: Replica, weights: WeightsInFolder, push_round: PushRound | None = None) -> None:
        """See `WeightTransport`."""
        await replica.dialect.load_folder(replica.client, replica.facts, weights)


def _unused_weights(model: nn.Module, place: Path) -> Path | None:
    """A file in `place` with the weights of the model's input that the model lacks, and that a server of the input
    wants; written once. None: there are none."""
    files = input_files_of(model)
    if files is None or not files.unused:
        return None
    unused = place / UNUSED
    if not unused.is_file():
        beside = place / f".{UNUSED}"
        copy_tensors(files.unused, beside)
        beside.rename(unused)
    return unused


def _write_weights(model: nn.Module, folder: Path, dtype: torch.dtype | None, unused: Path | None) -> None:
    """Write a model's weights under the names of its files, and link the file of the others."""
    total = 0
    weight_map = dict[str, str]()
    named = named_weights(model, file_names=True)
    for number, shard in enumerate(_shards(named, dtype), 1):
        file = f"model-{number:05}.safetensors"  # servers read them in this order
        save_file(shard, folder / file, metadata={"format": "pt"})
        total += sum(weight.nbytes for weight in shard.values())
        weight_map |= dict.fromkeys(shard, file)
    if unused is not None:
        try:
            (folder / UNUSED).hardlink_to(unused)
        except OSError:  # of a file system without links
            shutil.copyfile(unused, folder / UNUSED)
        with unused.open("rb") as opened:
            tensors = stored_tensors(opened)
        total += sum(tensor.size for tensor in tensors.values())
        weight_map |= dict.fromkeys(tensors, UNUSED)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")


def _shards(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[dict[str, Tensor]]:
    """Yield the weights to be written, one file's at a time; the dict is reused for the next file."""
    shard = dict[str, Tensor]()
    filled = 0
    for name, weight in named:
        copy = weight.detach().to("cpu", written_dtype(weight, dtype)).contiguous()
        if shard and filled + copy.nbytes > SHARD:
            yield shard
            shard.clear()
            filled = 0
        shard[name] = copy
        filled += copy.nbytes
    yield shard


def folder_bytes(folder: Path) -> int:
    """Bytes of the weights in a folder."""
    index = load_json((folder / INDEX).read_text(encoding="utf-8"))
    return int(index["metadata"]["total_size"])


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
        mode = 0o777 if shared else 0o700
        self.path.mkdir(mode)
        self._file = _lock(self.path, may_fail=shared)
        self._file.write(kernel_id())
        self._file.flush()

    def remove(self) -> None:
        """Remove the folder and its contents. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._file.close()


def _lock(folder: Path, *, may_fail: bool) -> IO[bytes]:
    """Create the lock file of a folder. It is locked before it gets its name, so that no other process takes it for a
    leftover.

    Args:
        may_fail: a file system without locks is not an error: there no process can mistake it for a leftover.
    """
    file = (folder / f"{LOCK_FILE}.{os.getpid()}").open("xb")
    try:
        lock(file, wait=True)
    except OSError:
        if not may_fail:
            raise
    os.rename(file.name, folder / LOCK_FILE)
    return file


def remove_leftovers(parent: Path, *, shared: bool = False) -> None:
    """Remove this user's folders of processes that have ended. Other users can put anything at such a name, so only
    folders and files of one's own are looked at.

    Args:
        shared: the parent is shared with other machines, whose locks may be invisible here: remove only folders created
            under this kernel.
    """
    for folder in parent.glob(f"{PREFIX}*"):
        try:
            facts = folder.lstat()
            if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
                continue
            with open_regular(folder / LOCK_FILE, "rb", own=True) as held:
                lock(held)
                if shared and (not kernel_id() or held.read(KERNEL_BYTES) != kernel_id()):
                    continue
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is locked, owned by another user, or gone
            continue
