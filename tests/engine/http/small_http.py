"""A small HTTP/1.1 server in a thread with an event loop of its own, for fakes of servers' protocols."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit


@dataclass
class Answer:
    """What a call answers: JSON, text, or events that are streamed; `drop` closes the connection instead."""

    body: object = None
    status: int = 200
    text: str | None = None
    events: AsyncIterator[object] | None = None
    drop: bool = False


@dataclass
class Call:
    """One call."""

    method: str
    path: str
    query: dict
    body: object
    headers: dict = field(default_factory=dict)


class SmallHttpServer:
    """Derive and define `async answer(call) -> Answer`. `with` starts and ends it; `url` is its address."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        self.calls: list[Call] = []
        self.connections = 0  # ever
        self._connections: set[asyncio.Task] = set()

    def __enter__(self):
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(30)
        return self

    def __exit__(self, *_):
        self.loop.call_soon_threadsafe(self._stopped.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self, ready):
        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(self._serve(ready))
        self.loop.close()

    async def _serve(self, ready):
        self._stopped = asyncio.Event()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        ready.set()
        await self._stopped.wait()
        server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _connected(self, reader, writer):
        task = asyncio.current_task()
        self._connections.add(task)
        self.connections += 1
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while await self._one(reader, writer):
                pass
        self._connections.discard(task)
        writer.close()

    async def _one(self, reader, writer) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        parts = urlsplit(target)
        call = Call(method, parts.path, dict(parse_qsl(parts.query)), json.loads(data) if data else None, headers)
        self.calls.append(call)
        answer = await self.answer(call)
        if answer.drop:
            return False
        if answer.events is not None:
            await self._stream(answer, writer)
            return True
        content = b"" if answer.body is None else json.dumps(answer.body).encode()
        if answer.text is not None:
            content = answer.text.encode()
        kind = "text/plain" if answer.text is not None else "application/json"
        writer.write(
            f"HTTP/1.1 {answer.status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        )
        writer.write(content)
        await writer.drain()
        return True

    async def _stream(self, answer, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            async for event in answer.events:
                line = f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()
                writer.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            await writer.drain()
        finally:
            await answer.events.aclose()
