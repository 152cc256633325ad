"""Gives servers of this machine the memory in which the weights are; nothing is sent.

On a GPU that trainer and server share, a bucket is in GPU memory, and the server gets a handle of it. On a CPU it is in
a file, which is in memory where there is room.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from proxima.data import UserError
from proxima.engine.http.dialect import WeightHandover
from proxima.engine.http.replica import Replica
from proxima.engine.http.weights.buckets import Buckets
from proxima.engine.http.weights.folder import StagedTransport, staged_buckets
from proxima.engine.http.weights.transport import PushRound
from proxima.engine.protocol import ServerError

REMEDY = "use engine.transfer=folder, or start both on one GPU"


class IpcTransport(StagedTransport):
    """See `WeightTransport`. Servers must be on this machine, and load weights with proxima's worker."""

    async def check(self, replicas: Sequence[Replica]) -> None:
        """See `WeightTransport`. A handle of GPU memory is valid on that GPU only."""
        on_gpus = [replica for replica in replicas if replica.facts.device == "cuda"]
        if on_gpus and not torch.cuda.is_available():
            raise UserError(f"{on_gpus[0].url} computes on a GPU, and the trainer sees none", remedy=REMEDY)
        for replica in on_gpus:
            gpu = str(torch.cuda.get_device_properties(0).uuid)
            try:
                await replica.dialect.check_transfer(replica.client, {"gpu": gpu}, self.spec.call_seconds)
            except ServerError as error:
                reason = f"{replica.url} does not share the trainer's GPU, {gpu}: {error.reason}"
                raise UserError(reason, remedy=REMEDY) from error

    async def push(self, replica: Replica, weights: WeightHandover, push_round: PushRound | None = None) -> None:
        """See `WeightTransport`. Each server is pushed by itself."""
        updates = _on_gpu if replica.facts.device == "cuda" else _in_file
        buckets = staged_buckets(replica.url, weights.folder)
        handover = replace(weights, updates=lambda: updates(buckets))
        await replica.dialect.load_weights(replica.client, replica.facts, handover)


async def _in_file(weights: Buckets) -> AsyncIterator[Mapping[str, Any]]:
    """One update: the file and the places in it."""
    buckets = weights.buckets
    yield {
        "file": str(weights.file),
        "tensors": [bucket.as_json for bucket in buckets],
        "starts": [bucket.start for bucket in buckets],
        "last": True,
    }


async def _on_gpu(weights: Buckets) -> AsyncIterator[Mapping[str, Any]]:
    """An update for each bucket. The next one is copied to the GPU while the server loads the one before it."""

    def copied(number: int) -> Tensor:
        bucket = weights.buckets[number]
        copy = memory[bucket.start : bucket.start + bucket.size].to("cuda")
        torch.cuda.synchronize()
        return copy

    memory, last = weights.memory(), len(weights.buckets) - 1
    coming = asyncio.create_task(asyncio.to_thread(copied, 0))
    for number, bucket in enumerate(weights.buckets):
        copy = await coming
        if number < last:
            coming = asyncio.create_task(asyncio.to_thread(copied, number + 1))
        yield {"tensors": [bucket.as_json], "handle": _handle(copy), "last": number == last}


def _handle(memory: Tensor) -> dict[str, Any]:
    """The arguments of `rebuild_cuda_tensor`, as JSON: bytes are in base64, after an equals sign."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, (_, size, stride, offset, _, _, device, handle, *sizes, grad, counter, at, event, waits) = reduce_tensor(memory)
    values = {"tensor_size": list(size), "tensor_stride": list(stride), "tensor_offset": offset}
    values |= {"storage_device": device, "storage_handle": handle, "storage_size_bytes": sizes[0]}
    values |= {"storage_offset_bytes": sizes[1], "requires_grad": grad, "ref_counter_handle": counter}
    values |= {"ref_counter_offset": at, "event_handle": event, "event_sync_required": waits}
    return {
        name: f"={base64.b64encode(value).decode()}" if isinstance(value, bytes) else value
        for name, value in values.items()
    }
