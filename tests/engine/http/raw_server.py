"""A server that writes bytes: vLLM's fake over a real socket, with one kind of call answered by a script."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx

from tests.engine.http.fake_vllm import FakeVllm
from tests.engine.http.small_http import SmallHttpServer, whole

PAUSE = None  # in a script: wait until the client leaves


class RawServer(SmallHttpServer):
    """Answers calls as `FakeVllm`, but those that `is_target` with `script(good)`, whose parts are written as they are.

    Args:
        script: from the good response to the bytes of another, in parts.
        is_target: (path, body) → whether the call is answered by the script.
    """

    def __init__(self, fake: FakeVllm | None = None, port: int = 0) -> None:
        super().__init__(port)
        self.fake = fake or FakeVllm()
        self.script: Callable[[httpx.Response], AsyncIterator[bytes | None]] | None = None
        self.is_target: Callable[[str, Any], bool] = lambda path, body: False
        self.sent = self.hit = 0  # most bytes of a script that left here, and calls that scripts answered

    async def listen(self) -> None:
        await super().listen()
        place = self.server.sockets[0]
        place.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # what is counted as sent is about what was read

    async def respond(self, call: httpx.Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.transport.set_write_buffer_limits(1 << 16)
        good = self.fake.answer(call)
        body = json.loads(call.content) if call.content else None
        if self.script is None or not self.is_target(call.url.path, body):
            writer.write(whole(good.status_code, good.content))
            await writer.drain()
            return True
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
