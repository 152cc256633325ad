"""Small HTTP/1.1 servers for fakes of servers' protocols."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import parse_qsl, urlsplit

from proxima.engine.event_loop_thread import EventLoopThread


@dataclass
class Call:
    """One call."""

    method: str
    target: str
    path: str
    query: dict
    content: bytes
    headers: dict = field(default_factory=dict)

    @property
    def body(self) -> object:
        return json.loads(self.content) if self.content else None


class HttpListener:
    """Reads calls in the event loop where it listens. Derive and define `async respond(call, reader, writer) -> bool`,
    which says whether the connection stays."""

    def __init__(self):
        self.connections = 0  # ever
        self.handlers: set[asyncio.Task] = set()
        self.life: object = None  # since `listen`, until `close`

    async def listen(self, port: int = 0) -> None:
        life = self.life = object()
        self.server = await asyncio.start_server(
            lambda reader, writer: self._connected(life, reader, writer), "127.0.0.1", port, limit=2**24
        )
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Close every connection, and accept no other."""
        self.life = None
        self.server.close()
        for task in list(self.handlers):
            task.cancel()
        await asyncio.gather(*self.handlers, return_exceptions=True)

    async def _connected(self, life, reader, writer):
        if life is not self.life:  # accepted before `close`, begun after it
            writer.transport.abort()
            return
        task = asyncio.current_task()
        self.handlers.add(task)
        self.connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self.respond(await self._call(reader), reader, writer):
                    pass
        finally:
            self.handlers.discard(task)
            writer.transport.abort()

    async def _call(self, reader) -> Call:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        parts = urlsplit(target)
        return Call(method, target, parts.path, dict(parse_qsl(parts.query)), content, headers)


def whole(status: int, content: bytes, kind: str = "application/json", *, last: bool = False, more: str = "") -> bytes:
    """The bytes of a response; `last`: the connection is closed after it, which a client must know: the next call on
    it would be lost. `more`: other header lines."""
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n{more}"
    return (head + "Connection: close\r\n" * last + "\r\n").encode() + content


def chunk(content: bytes) -> bytes:
    """Of a chunked response; an empty one ends it."""
    return f"{len(content):x}\r\n".encode() + content + b"\r\n"


@dataclass
class Answer:
    """What a call answers: JSON, text, or events that are streamed."""

    body: object = None
    status: int = 200
    text: str | None = None
    events: AsyncIterator[object] | None = None


class SmallHttpServer(HttpListener):
    """Derive and define `async answer(call) -> Answer`. `with` starts and ends it, in a thread of its own; `url` is its
    address."""

    def __init__(self):
        super().__init__()
        self.calls: list[Call] = []

    def __enter__(self):
        self._thread = EventLoopThread("small-http")
        self._thread.call(self.listen())
        return self

    def __exit__(self, *_):
        self._thread.close(self.close)

    async def respond(self, call, reader, writer) -> bool:
        self.calls.append(call)
        answer = await self.answer(call)
        if answer.events is not None:
            await self._stream(answer, writer)
            return True
        if answer.text is not None:
            writer.write(whole(answer.status, answer.text.encode(), "text/plain"))
        else:
            writer.write(whole(answer.status, b"" if answer.body is None else json.dumps(answer.body).encode()))
        await writer.drain()
        return True

    async def _stream(self, answer, writer):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        try:
            async for event in answer.events:
                writer.write(chunk(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()))
                await writer.drain()
            writer.write(chunk(b""))
            await writer.drain()
        finally:
            await answer.events.aclose()
