"""A server that writes bytes: vLLM's fake over a real socket, with one kind of call answered by a script."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import httpx

from proxima.engine.event_loop_thread import EventLoopThread
from tests.engine.http.fake_vllm import FakeVllm

PAUSE = None  # in a script: wait until the client leaves


class RawServer:
    """Answers calls as `FakeVllm`, but those that `is_target` with `script(good)`, whose parts are written as they are.

    Args:
        script: from the good response to the bytes of another, in parts.
        is_target: (path, body) → whether the call is answered by the script.
        left: how many of these calls are.
    """

    def __init__(self, loop: EventLoopThread) -> None:
        self.loop, self.fake = loop, FakeVllm()
        self.script: Callable[[httpx.Response], AsyncIterator[bytes | None]] | None = None
        self.is_target: Callable[[str, Any], bool] = lambda path, body: False
        self.left: float = 0
        self.sent = self.hit = 0  # most bytes of a script that left here, and calls that scripts answered
        self.handlers: set[asyncio.Task[None]] = set()
        loop.call(self._listen())

    async def _listen(self) -> None:
        self.server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        place: socket.socket = self.server.sockets[0]
        place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # what is counted as sent is about what was read
        self.url = f"http://127.0.0.1:{place.getsockname()[1]}"

    async def close(self) -> None:
        self.server.close()
        for task in list(self.handlers):
            task.cancel()
        await asyncio.gather(*self.handlers, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.handlers.add(task)
        writer.transport.set_write_buffer_limits(1 << 16)
        try:
            with suppress(asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                while await self._one(reader, writer):
                    pass
        finally:
            self.handlers.discard(task)
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        method, target, _ = head[0].split(" ")
        headers = dict(line.split(": ", 1) for line in head[1:] if line)
        data = await reader.readexactly(int({k.lower(): v for k, v in headers.items()}.get("content-length", 0)))
        good = self.fake.answer(httpx.Request(method, f"http://x{target}", content=data))
        path, body = target.partition("?")[0], json.loads(data) if data else None
        if self.script is None or self.left <= 0 or not self.is_target(path, body):
            writer.write(_whole(good))
            await writer.drain()
            return True
        self.left -= 1
        self.hit += 1
        leaving = asyncio.ensure_future(reader.read(1))
        writing = asyncio.ensure_future(self._write(writer, self.script(good)))
        await asyncio.wait({leaving, writing}, return_when=asyncio.FIRST_COMPLETED)
        for entry in (leaving, writing):
            entry.cancel()
        await asyncio.gather(leaving, writing, return_exceptions=True)
        return False

    async def _write(self, writer: asyncio.StreamWriter, parts: AsyncIterator[bytes | None]) -> None:
        sent = 0
        async for part in parts:
            if part is None:
                await asyncio.Event().wait()
            else:
                writer.write(part)
                await writer.drain()
                sent += len(part)
                self.sent = max(self.sent, sent)
        writer.write_eof()
        await asyncio.sleep(0.05)  # the client takes what is on its way


def _whole(response: httpx.Response) -> bytes:
    head = f"HTTP/1.1 {response.status_code} X\r\nContent-Length: {len(response.content)}\r\n\r\n"
    return head.encode() + response.content
