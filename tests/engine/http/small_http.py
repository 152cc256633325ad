"""A small HTTP/1.1 server for fakes of servers' protocols."""

import asyncio
from contextlib import suppress

import httpx

from proxima.engine.event_loop_thread import EventLoopThread


class SmallHttpServer:
    """Derive and define `async answer(request) -> httpx.Response`. `with` starts and ends it, in a thread of its own;
    `url` is its address."""

    host = "127.0.0.1"

    def __init__(self, port: int = 0):
        self.port = port  # 0: a free one
        self.connections = 0  # ever
        self.calls: list[httpx.Request] = []
        self.handlers: set[asyncio.Task] = set()

    def __enter__(self):
        self._thread = EventLoopThread("small-http")
        self._thread.call(self.listen())
        return self

    def __exit__(self, *_):
        self._thread.close(self._close)

    async def listen(self) -> None:
        self.server = await asyncio.start_server(self._connected, self.host, self.port, limit=2**24)
        self.url = f"http://{self.host}:{self.server.sockets[0].getsockname()[1]}"

    async def _close(self) -> None:
        self.server.close()
        for task in list(self.handlers):
            task.cancel()
        await asyncio.gather(*self.handlers, return_exceptions=True)

    async def _connected(self, reader, writer):
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

    async def _call(self, reader) -> httpx.Request:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = httpx.Headers([line.split(": ", 1) for line in head[1:] if line])
        content = await reader.readexactly(int(headers.get("content-length", 0)))
        self.calls.append(httpx.Request(method, f"http://x{target}", content=content, headers=headers))
        return self.calls[-1]

    async def respond(self, call: httpx.Request, reader, writer) -> bool:
        """Whether the connection stays."""
        answer = await self.answer(call)
        try:
            writer.write(whole(answer.status_code, answer.content))
        except httpx.ResponseNotRead:  # it streams
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            async for part in answer.stream:
                writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True


def whole(status: int, content: bytes) -> bytes:
    """The bytes of a response."""
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content
