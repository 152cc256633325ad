"""Gives servers that share the trainer's devices a handle of the memory in which a bucket is; nothing is sent.

Each rank fills the bucket on its own GPU, and the worker on that GPU gets this rank's handle; so servers may be
tensor-parallel, and on any node. Without GPUs the memory is that of a file on this machine, and all get rank 0's.
"""

import asyncio
import base64
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from proxima.data import UserError
from proxima.engine.http.dialect import NewWeights
from proxima.engine.http.replica import Replica
from proxima.engine.http.weights.buckets import Bucket, filled_buckets
from proxima.engine.http.weights.stream import (
    NAME,
    Errors,
    StreamedWeights,
    StreamTransport,
    device_of,
    devices_of,
    gpu_name,
)
from proxima.engine.http.weights.transport import Receivers
from proxima.engine.http.weights.weight_folders import LockedFolder, remove_leftovers
from proxima.engine.protocol import ServerError, WeightUpdate
from proxima.model.parallel.lending import lender_of, rounded
from proxima.system.linux import SHARED_MEMORY, allocate

REMEDY = "use engine.transfer=group, or start each server on GPUs of the trainer's ranks"
Handles = dict[str, dict[str, Any]]  # of the memory of a bucket, by the device on which it is


class IpcTransport(StreamTransport):
    """See `WeightTransport`. Servers load weights with proxima's worker."""

    @classmethod
    def unreached(cls, servers: Receivers) -> str | None:
        """See `WeightTransport`. Whether the GPUs are the same ones is found out by `check`."""
        if not servers.offer("ipc"):
            return "is not offered by every server"
        if not (servers.on_this_machine or (servers.shared and servers.on_gpus)):
            return "needs servers on this machine, or on the GPUs of the trainer's ranks"
        return None

    @classmethod
    def cost(cls, servers: Receivers) -> float:
        """See `WeightTransport`: a copy within a GPU; on a CPU one more than for a folder. Servers that take no turns
        with the ranks have other GPUs, as far as is known before `check`."""
        if not servers.on_gpus:
            return 1.5
        return 0.02 if servers.shared else 0.5

    @classmethod
    def reason(cls, servers: Receivers) -> str:
        return "the servers and the trainer share their GPUs"

    async def check(self, replicas: Sequence[Replica], update: WeightUpdate) -> None:
        """See `WeightTransport`. A handle of GPU memory is valid on that GPU only: each worker must be on one of those
        of the ranks."""
        on_gpu = device_of(update.module).type == "cuda"
        for replica in replicas:
            if (replica.facts.device == "cuda") != on_gpu:
                ours, theirs = ("a GPU", "a CPU") if on_gpu else ("a CPU", "a GPU")
                raise UserError(f"{replica.url} computes on {theirs}, and the trainer on {ours}", remedy=REMEDY)
        if not replicas or not on_gpu:
            return
        devices = await self.compute(devices_of, update.module)
        for replica in replicas:
            try:
                await replica.dialect.check_transfer(replica.client, "devices", devices, self.spec.call_seconds)
            except ServerError as error:
                reason = f"{replica.url} does not share the trainer's GPUs, {', '.join(devices)}: {error.reason}"
                raise UserError(reason, remedy=REMEDY) from error

    async def send(self, weights: StreamedWeights, replicas: Sequence[Replica], *, alone: bool) -> Errors:
        """See `StreamTransport`. A server that fails does not keep the others from theirs."""
        delivery = _Delivery(replicas)
        streaming = asyncio.create_task(self.compute(_stream, weights, delivery))
        turn = asyncio.create_task(delivery.turn.wait())  # before it nothing is asked of a server
        try:
            await asyncio.wait({turn, streaming}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            delivery.stop()
            raise
        finally:
            turn.cancel()
        if not delivery.turn.is_set():
            await streaming  # raises
        calls = {asyncio.create_task(_load(replica, weights, delivery)): replica for replica in replicas}
        try:
            await asyncio.wait({*calls, streaming})  # each call has a deadline, and the stream ends with the last one
        finally:
            delivery.stop()
            for call in calls:
                call.cancel()
        own = streaming.exception()
        errors = Errors()
        for call, replica in calls.items():
            error = _error_of(call)
            if error is not None:
                errors[replica] = error
        if own is not None and not isinstance(own, _NobodyLeft):
            raise own
        return errors


class _NobodyLeft(Exception):
    """No server is loading any longer."""


@dataclass(frozen=True)
class _Ended:
    """There are no more updates; `whole`: the servers have got all of them."""

    whole: bool


class _Delivery:
    """Updates that the thread for tensor work makes, and that the calls to the servers take."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._loop = asyncio.get_running_loop()
        self._queues = {replica: asyncio.Queue[Mapping[str, Any] | _Ended]() for replica in replicas}
        self._loading = set[Replica]()  # those that have not loaded the last update
        self.turn = asyncio.Event()  # the weights can be read now
        self._changed = threading.Condition()
        self._stopped = False

    def begin(self) -> None:
        """The weights can be read from now on. Called in the thread for tensor work, as the next three."""
        self._loop.call_soon_threadsafe(self.turn.set)

    def give(self, update: Mapping[str, Any]) -> None:
        """Wait until every server has loaded the update before, and give all of them this one.

        Raises:
            _NobodyLeft: no server takes it.
        """
        with self._changed:
            self.wait()
            queues = dict(self._queues)
            if self._stopped or not queues:
                raise _NobodyLeft
            self._loading |= set(queues)
        for each in queues.values():
            self._loop.call_soon_threadsafe(each.put_nowait, update)

    def wait(self) -> None:
        """Wait until every server has loaded what it was given, or has failed: each call has a deadline."""
        with self._changed:
            self._changed.wait_for(lambda: not self._loading or self._stopped)

    def end(self, ended: "_Ended") -> None:
        """Tell those that wait for an update that there are no more."""
        with self._changed:
            queues = dict(self._queues)
        for each in queues.values():
            self._loop.call_soon_threadsafe(each.put_nowait, ended)

    async def updates(self, replica: Replica) -> AsyncIterator[Mapping[str, Any]]:
        """Those of one server."""
        waiting = self._queues[replica]
        while not isinstance(update := await waiting.get(), _Ended):
            yield update
            self._loaded(replica)
        if not update.whole:
            raise ServerError(replica.url, NAME, "the trainer could not send them all")

    def leave(self, replica: Replica) -> None:
        """This server takes no more updates."""
        with self._changed:
            self._queues.pop(replica, None)
        self._loaded(replica)

    def stop(self) -> None:
        """No server does."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _loaded(self, replica: Replica) -> None:
        with self._changed:
            self._loading.discard(replica)
            self._changed.notify_all()


async def _load(replica: Replica, weights: NewWeights, delivery: _Delivery) -> None:
    try:
        await replica.dialect.load_updates(replica.client, replica.facts, weights, delivery.updates(replica))
    finally:
        delivery.leave(replica)


def _error_of(call: "asyncio.Task[None]") -> Exception | None:
    if call.cancelled():
        raise asyncio.CancelledError
    error = call.exception()
    if error is None or isinstance(error, ServerError | UserError):
        return error
    raise error


def _stream(weights: StreamedWeights, delivery: _Delivery) -> None:
    """Fill the buckets and deliver them; in the thread for tensor work."""
    whole = False
    try:
        with weights.lent():
            delivery.begin()
            lender = lender_of(weights.module)
            fill = partial(_fill, plan=weights.plan, dtype=weights.dtype, file_names=weights.file_names)
            if lender is None:
                problem = fill(_Alone(weights.module), delivery)
            else:
                problem = lender.everywhere(fill, delivery)
        if problem is not None:
            raise problem
        whole = True
    finally:
        delivery.end(_Ended(whole))


class _Alone:
    """A single process in place of a `LayerLender`, and of its ranks."""

    rank = 0

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.ranks = self

    def share_value(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]


def _fill(
    lender: Any,
    delivery: _Delivery | None = None,
    *,
    plan: Sequence[Bucket],
    dtype: torch.dtype | None,
    file_names: bool,
) -> BaseException | None:
    """Every rank fills the same buckets, each in its own memory; rank 0 delivers the handles of all. Returns its
    problem, after which the ranks are still together."""
    module = lender.module
    ranks = lender.ranks
    memory = _BucketMemory(device_of(module), named=delivery is not None)
    problem: BaseException | None = None
    try:
        with rounded(module, dtype):
            for bucket, content in filled_buckets(module, plan, memory.allocate, file_names=file_names):
                handles = ranks.gather(memory.handle(content))
                if delivery is not None:
                    by_device = Handles()
                    for of_rank in handles:
                        by_device |= of_rank
                    content_of = {"handles": by_device, "tensors": bucket.as_json}
                    update = {"kind": "ipc", "content": content_of, "last": bucket is plan[-1]}
                    problem = _attempt(delivery, update)
                if not ranks.share_value(problem is None):
                    return problem
        if delivery is not None:  # until all have loaded the last one, no rank frees its memory
            delivery.wait()
        ranks.share_value(None)
        return None
    finally:
        memory.free()


def _attempt(delivery: _Delivery, update: Mapping[str, Any]) -> BaseException | None:
    try:
        delivery.give(update)
    except BaseException as error:
        return error
    return None


class _BucketMemory:
    """Memory of a device that other processes can read.

    Args:
        named: without GPUs: the memory is that of files, of which there are handles; otherwise there are none.
    """

    def __init__(self, device: torch.device, *, named: bool) -> None:
        self.device = device
        self.named = named
        self._folder: LockedFolder | None = None
        self._files = dict[int, Path]()  # by the address of their first byte

    def allocate(self, size: int) -> Tensor:
        """[size] uint8."""
        if self.device.type == "cuda" or not self.named:
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        if self._folder is None:
            remove_leftovers(SHARED_MEMORY)
            place = Path(tempfile.gettempdir())
            if SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 4 * size:
                place = SHARED_MEMORY
            self._folder = LockedFolder(place)
        file = self._folder.path / f"bucket-{len(self._files)}"
        with file.open("xb") as opened:
            allocate(opened, size)
        memory = torch.from_file(str(file), shared=True, size=size, dtype=torch.uint8)
        self._files[memory.data_ptr()] = file
        return memory

    def handle(self, content: Tensor) -> Handles:
        """The handle of filled memory, by its device; the bytes are there when it returns."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
            return {gpu_name(self.device): _cuda_handle(content)}
        file = self._files.get(content.data_ptr())
        if file is None:
            return {}
        return {"cpu": {"file": str(file), "size": content.numel()}}

    def free(self) -> None:
        """Remove the files."""
        if self._folder is not None:
            self._folder.remove()


def _cuda_handle(memory: Tensor) -> dict[str, Any]:
    """The arguments of `rebuild_cuda_tensor`, as JSON: bytes are in base64, after an equals sign."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, (_, size, stride, offset, _, _, _, handle, *sizes, grad, counter, at, event, waits) = reduce_tensor(memory)
    values = {
        "tensor_size": list(size),
        "tensor_stride": list(stride),
        "tensor_offset": offset,
        "storage_handle": handle,
        "storage_size_bytes": sizes[0],
        "storage_offset_bytes": sizes[1],
        "requires_grad": grad,
        "ref_counter_handle": counter,
        "ref_counter_offset": at,
        "event_handle": event,
        "event_sync_required": waits,
    }
    return {name: _encoded(value) for name, value in values.items()}


def _encoded(value: object) -> object:
    if isinstance(value, bytes):
        return f"={base64.b64encode(value).decode()}"
    return value
