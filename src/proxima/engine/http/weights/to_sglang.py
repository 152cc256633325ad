"""New weights for SGLang: from a folder, or over a process group, by the server's own API.

The server forms its end of a group by torch's rendezvous, at the trainer's store. It has no deadline for that, nor for
a bucket that does not come, and waits half an hour by torch's default; but it fails at once when the trainer breaks its
own end. So each server has a group of its own with the trainer. All are sent the weights at the same time; those that
hang cost the others at most half of `engine.weight_seconds`, however many they are.

It has no completeness check either: a tensor that it was not sent, or does not know, is found by the probe.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from proxima.engine.http.answer_values import one_line
from proxima.engine.http.client import Deadline, ServerClient
from proxima.engine.http.dialect import INCOMPLETE, UPDATE_POLLS, NewWeights, WeightsInFolder, is_incomplete
from proxima.engine.protocol import ServerError

LOAD = "/update_weights_from_disk"
RECEIVE = "/update_weights_from_distributed"
BEGIN = "/begin_weight_update"
END = "/end_weight_update"
JOIN = "/init_weights_update_group"
LEAVE = "/destroy_weights_update_group"
GROUP = "proxima"  # the server's name for its group; it is in one at a time
NO_CALL = (404, 405, 501)
TRANSFERS = ("folder", "group")  # the ways to send it weights, of the table of transports


async def load_folder(client: ServerClient, weights: WeightsInFolder) -> None:
    """See `SglangDialect.load_folder`."""
    deadline = Deadline(weights.seconds)
    await _set_label(client, f"{INCOMPLETE}{weights.label}", deadline)
    body = {
        "model_path": str(weights.folder),
        "load_format": None,
        "weight_version": weights.label,
        "token_step": weights.version,
        "abort_all_requests": False,
        "is_async": False,
        "keep_pause": True,
        "recapture_cuda_graph": False,
        "torch_empty_cache": False,
        "flush_cache": False,
    }
    await client.post(LOAD, body, seconds=deadline.left)


async def receive_updates(client: ServerClient, weights: NewWeights, updates: AsyncIterator[Mapping[str, Any]]) -> None:
    """See `SglangDialect.load_updates`."""
    deadline = Deadline(weights.seconds)
    incomplete = f"{INCOMPLETE}{weights.label}"
    await _set_label(client, incomplete, deadline)
    await _begin_update(client, deadline)
    await _set_label(client, incomplete, deadline)  # another run may have ended an update of its own in between
    async for update in updates:
        await _receive(client, update["content"], deadline)
    await _check_alone(client, incomplete, deadline)
    await _end_update(client, deadline)
    await _set_label(client, weights.label, deadline)


def store_prefixes(backend: str) -> tuple[str, ...]:
    """See `Dialect.store_prefixes`. SGLang puts the group's name before the keys, and torch, which then forms the
    group, puts the name once more, and the device, each with a slash behind it."""
    device = "cuda" if backend == "nccl" else "cpu"
    return GROUP, f"{GROUP}/", f"{device}/"


async def group_facts(client: ServerClient, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The facts needed to form a process group with the server: its device, and the number of its workers, which may
    only be tensor-parallel. A group that can't be formed is not offered."""
    device = settings.get("device")
    facts: dict[str, Any] = {"device": device if isinstance(device, str) else None}
    workers = settings.get("tp_size")
    others = (settings.get("pp_size"), settings.get("dp_size"))
    if type(workers) is int and workers > 0 and others == (1, 1) and await _has_groups(client):
        facts["workers"] = workers
        facts["transfers"] = TRANSFERS
    return facts


async def _has_groups(client: ServerClient) -> bool:
    """Ask the server to leave a group that it is not in: whether it knows the call."""
    try:
        await client.post(LEAVE, {"group_name": "none"})
    except ServerError as error:
        if error.status is None:
            raise
        return error.status not in NO_CALL
    return True


async def _set_label(client: ServerClient, label: str, deadline: Deadline) -> None:
    body = {"new_version": label, "abort_all_requests": False}
    await client.post("/update_weight_version", body, seconds=min(client.seconds, deadline.left))


async def _begin_update(client: ServerClient, deadline: Deadline) -> None:
    """Begin an update of the weights. One that the server holds open, for which it refuses, is ended first; older
    servers have no such call, and need none."""
    try:
        await client.post(BEGIN, {}, seconds=deadline.left)
    except ServerError as error:
        if error.status is None:  # it has not answered
            raise
        if error.status in NO_CALL:
            return
        await _end_update(client, deadline)
        await client.post(BEGIN, {}, seconds=deadline.left)


async def _end_update(client: ServerClient, deadline: Deadline) -> None:
    """End an update: the server processes the weights that it has received."""
    try:
        await client.post(END, {}, seconds=deadline.left)
    except ServerError as error:
        if error.status not in NO_CALL:
            raise


async def _receive(client: ServerClient, update: Mapping[str, Any], deadline: Deadline) -> None:
    """Have the server join the group of an update, and receive its buckets, which have no gaps.

    Raises:
        ServerError: a call failed. The server has left the group, if it could, which ends the trainer's wait.
    """
    try:
        await _receive_all(client, update, deadline)
    except ServerError as error:
        if error.status is not None:
            with suppress(ServerError):
                await _leave(client, deadline)
        raise


async def _receive_all(client: ServerClient, update: Mapping[str, Any], deadline: Deadline) -> None:
    group = update["group"]
    if not group["reused"]:
        await _leave(client, deadline)
        joining = {
            "master_address": group["host"],
            "master_port": group["port"],
            "group_name": GROUP,
            "rank_offset": group["rank"],
            "world_size": group["size"],
            "backend": group["backend"],
        }
        await client.post(JOIN, joining, seconds=deadline.left)
    for tensors in update["tensors"]:
        names, dtypes, shapes, _ = zip(*tensors, strict=True)
        bucket = {
            "names": names,
            "dtypes": dtypes,
            "shapes": shapes,
            "group_name": GROUP,
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "abort_all_requests": False,
        }
        await client.post(RECEIVE, bucket, seconds=deadline.left)


async def _leave(client: ServerClient, deadline: Deadline) -> None:
    with _suppressed(400):  # it is in none
        await client.post(LEAVE, {"group_name": GROUP}, seconds=deadline.left)


async def wake(client: ServerClient) -> bool:
    """Resume a server that an earlier run has left paused, which the server does not report, or in the middle of an
    update of its weights, which is ended first. True: its weights are incomplete."""
    for _ in range(UPDATE_POLLS):  # another run may be updating it at this moment
        if not await _is_incomplete(client):
            break
        await asyncio.sleep(1.0)
    incomplete = await end_broken_update(client)
    await client.post("/continue_generation", {})
    return incomplete


async def _is_incomplete(client: ServerClient) -> bool:
    return is_incomplete(await _label(client))


async def _label(client: ServerClient) -> object:
    model = await client.get("/model_info")
    if isinstance(model, Mapping):
        return model.get("weight_version")
    return None


async def _check_alone(client: ServerClient, label: str, deadline: Deadline) -> None:
    """Raise ServerError if the label is another one: another run has begun or ended an update, so that nobody knows
    whose weights these are. The update is ended, and they are incomplete."""
    found = await _label(client)
    if found != label:
        await _set_label(client, label, deadline)
        await _end_update(client, deadline)
        raise ServerError(client.url, "/model_info", f"another run is changing its weights: {one_line(found, 80)!r}")


async def end_broken_update(client: ServerClient) -> bool:
    """If the last update of the weights was interrupted, end it. The weights, and their label, remain incomplete; True
    if they are."""
    incomplete = await _is_incomplete(client)
    if incomplete:
        with _suppressed(400):  # none is open
            await _end_update(client, Deadline(client.seconds))
    return incomplete


@contextmanager
def _suppressed(status: int) -> Iterator[None]:
    """Suppress the error of an answer with this status."""
    try:
        yield
    except ServerError as error:
        if error.status != status:
            raise
