"""Server-sent events: how servers stream JSON."""

import json
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

from proxima.engine.http.client import ServerError

if TYPE_CHECKING:
    from proxima.engine.http.client import ServerClient


async def stream_events(
    client: "ServerClient", path: str, body: Any, *, idle_seconds: float | None = None
) -> AsyncGenerator[dict[str, Any], None]:
    """The JSON objects of a streamed answer to a POST, up to its `[DONE]`. Read to its end, its connection serves
    another call; closing it before that closes the connection.

    Raises:
        ServerError: as `ServerClient.lines`; an event that is no JSON object; an error that the server sent as an
            event; an answer that stops before its end.
    """
    done = False
    async with client.lines(path, body, idle_seconds=idle_seconds) as lines:
        async for line in lines:
            if done or not line.startswith("data:"):
                continue  # blank lines between events, comments, and fields that no server of ours uses
            data = line[5:].strip()
            if data == "[DONE]":
                done = True
                continue
            try:
                event = json.loads(data)
            except ValueError as error:
                raise ServerError(client.url, path, f"streams something else than JSON: {data[:100]}") from error
            if not isinstance(event, dict):
                raise ServerError(client.url, path, f"streams something else than a JSON object: {data[:100]}")
            if (failure := event.get("error")) is not None:
                told = failure.get("message", failure) if isinstance(failure, dict) else failure
                raise ServerError(client.url, path, f"ended with an error: {' '.join(str(told).split())[:200]}")
            yield event
    if not done:
        raise ServerError(client.url, path, "the stream broke off")
