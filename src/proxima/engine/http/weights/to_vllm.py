"""New weights for vLLM: its weight-transfer API, adapters, and what a run that broke off has left behind."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from proxima.engine.http.answer_values import short_text, value_at
from proxima.engine.http.client import Deadline, ServerClient, answer_or_none, as_expected
from proxima.engine.http.dialect import (
    ADAPTER,
    INCOMPLETE,
    UPDATE_POLLS,
    NewWeights,
    ServerFacts,
    WeightsInFolder,
    is_incomplete,
)
from proxima.engine.protocol import ServerError

MOVE_SECONDS = 600.0  # deadline for moving the weights to host memory, or back


async def transfer_weights(
    client: ServerClient, weights: NewWeights, updates: AsyncIterator[Mapping[str, Any]]
) -> None:
    """See `VllmDialect.load_updates`."""
    deadline = Deadline(weights.seconds)
    await client.post("/init_weight_transfer_engine", {"init_info": {}}, seconds=deadline.left, alone=True)
    incomplete = f"{INCOMPLETE}{weights.label}"
    await _set_label(client, incomplete, deadline)
    await start_update(client, deadline)
    await _set_label(client, incomplete, deadline)  # another run may have ended an update of its own in between
    async for update in updates:
        call = {"update_info": {**update, "label": weights.label}}
        await client.post("/update_weights", call, seconds=deadline.left, alone=True)
    await _check_alone(client, incomplete, deadline)
    finish = {"weight_version": weights.label}
    await client.post("/finish_weight_update", finish, seconds=deadline.left, alone=True)


async def transfer_adapter(client: ServerClient, facts: ServerFacts, weights: WeightsInFolder, link: Path) -> None:
    """See `VllmDialect.load_adapter`."""
    deadline = Deadline(weights.seconds)
    await _set_label(client, f"{INCOMPLETE}{weights.label}", deadline)
    served = await client.get("/v1/models")
    with as_expected(client, "/v1/models", served):
        paths = {card["id"]: card["root"] for card in served["data"]}
    if facts.adapter is not None and paths.get(ADAPTER) == str(link):
        call = {"method": "replace_adapter", "kwargs": {"folder": str(weights.folder)}}
        await client.post("/collective_rpc", call, seconds=deadline.left, alone=True)
    else:
        if ADAPTER in paths:  # of another run, or lost by the workers
            await client.post_text("/v1/unload_lora_adapter", {"lora_name": ADAPTER}, alone=True)
        await client.post("/collective_rpc", {"method": "skip_head_adapter"}, seconds=deadline.left, alone=True)
        named = {"lora_name": ADAPTER, "lora_path": str(link)}
        await client.post_text("/v1/load_lora_adapter", named, seconds=deadline.left, alone=True)
    await _set_label(client, weights.label, deadline)


async def _set_label(client: ServerClient, label: str, deadline: Deadline) -> None:
    body = {"new_version": label}
    await client.post("/update_weight_version", body, seconds=min(client.seconds, deadline.left))


async def _check_alone(client: ServerClient, label: str, deadline: Deadline) -> None:
    """Raise ServerError if the label is another one: another run has begun or ended an update, so that nobody knows
    whose weights these are. The update is closed, and they are incomplete."""
    path = "/weight_info"
    answer = await client.get(path)
    with as_expected(client, path, answer):
        found = short_text(answer["weight_version"], "weight_version")
    if found != label:
        await _set_label(client, label, deadline)
        await client.post("/finish_weight_update", {}, seconds=deadline.left, alone=True)
        raise ServerError(client.url, path, f"another run is changing its weights: {found!r}")


def files_of(url: str, weights: WeightsInFolder) -> AsyncIterator[Mapping[str, Any]]:
    """The updates that a folder consists of, one for each file. ServerError: they are gone."""
    files = sorted(weights.folder.glob("*.safetensors"))
    if not files:
        raise ServerError(url, "", f"the weights are gone from {weights.folder}")
    return _each([{"kind": "file", "content": {"file": str(file)}, "last": file == files[-1]} for file in files])


async def _each(updates: Sequence[Mapping[str, Any]]) -> AsyncIterator[Mapping[str, Any]]:
    for update in updates:
        yield update


async def wake_server(client: ServerClient) -> bool:
    """Make a server compute that an earlier run has left asleep, paused, which vLLM does not distinguish, or in the
    middle of an update of its weights. True: its weights are incomplete."""
    for _ in range(UPDATE_POLLS):  # another run may be updating it at this moment
        if not await _is_incomplete(client):
            break
        await asyncio.sleep(1.0)
    asleep = value_at(await answer_or_none(client.get("/is_sleeping")), "is_sleeping") is True
    if asleep:
        await wake_up(client, "weights", "kv_cache")
    incomplete = await close_broken_update(client)
    if asleep:
        await client.post("/resume")
    return incomplete


async def _is_incomplete(client: ServerClient) -> bool:
    return is_incomplete(value_at(await answer_or_none(client.get("/weight_info")), "weight_version"))


async def close_broken_update(client: ServerClient) -> bool:
    """If the last update of the weights was interrupted, close it: a request to a server with half-loaded layers ends
    it. Its weights, and their label, remain incomplete; True if they are."""
    incomplete = await _is_incomplete(client)
    if incomplete:
        deadline = Deadline(MOVE_SECONDS)
        await start_update(client, deadline)
        await client.post("/finish_weight_update", {}, seconds=deadline.left, alone=True)
    return incomplete


async def start_update(client: ServerClient, deadline: Deadline) -> None:
    """Start an update of the weights. One that the server holds open, for which it refuses, is finished first."""
    try:
        await client.post("/start_weight_update", seconds=deadline.left, alone=True)
    except ServerError as error:
        if error.status is None:  # it has not answered
            raise
        await client.post("/finish_weight_update", {}, seconds=deadline.left, alone=True)
        await client.post("/start_weight_update", seconds=deadline.left, alone=True)


async def wake_up(client: ServerClient, *tags: str) -> None:
    """Make the server take parts of its memory again, in this order; whatever is already awake is left unchanged."""
    for tag in tags:
        await client.post(f"/wake_up?tags={tag}", seconds=MOVE_SECONDS)
