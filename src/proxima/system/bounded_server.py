"""An HTTP server with bounds on its connections, for a scorer, `proxima view`, the endpoint for agents and
`proxima serve-training`; and a reader of bodies with bounds, for the first and the last."""

import asyncio
import math
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.exceptions import HTTPException
from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from proxima.data import UserError
from proxima.system.web_requests import LOOPBACK_NAMES, is_loopback, refused

WRITE_SECONDS = 30.0  # for a client that has stopped reading to read again
GRACE_SECONDS = 1  # for requests that are being answered when the server shuts down
CROWDED_SECONDS = 1.0  # for a connection without a request, while there are as many as may be
MOST_PARSED = 1 << 16  # bytes that are parsed before other connections have their turn
MOST_DISCARDED = 1 << 27  # bytes of a body that was refused
MOST_ACCEPTED = 128  # connections that are accepted at once
QUEUE = 1024  # connections that wait in the kernel for it
MOST_FILES = 1 << 16  # that are asked of the system
BUSY = {"Retry-After": "1"}
GONE = "the client left"
READ = "proxima.read"  # set in the scope of a request whose body is complete or no longer awaited


class BoundedProtocol(H11Protocol):
    """uvicorn's connection. It is closed at once if there are too many. After a response to a request whose body was
    not read, nothing more is sent, and what the client still sends is discarded unparsed: while it sends, it does not
    read the response, and a million chunks of a byte would keep the event loop busy for a minute.

    Args:
        most: simultaneous connections.
    """

    def __init__(self, *, most: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.most = most  # bytes
        self.discarded = -1  # bytes; -1: nothing is discarded

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as in uvicorn's
        super().connection_made(transport)
        transport.max_size = MOST_PARSED  # type: ignore[attr-defined]  # of asyncio's transports of sockets
        self.transport = LingeringTransport(self, transport)  # type: ignore[assignment]  # stands in for one
        if len(self.connections) > self.most:
            transport.abort()

    def on_response_complete(self) -> None:
        if self.cycle.more_body and not self.transport.is_closing():
            self.discarded = 0
            self.transport.write_eof()
            self.flow.resume_reading()
        else:
            super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        if self.discarded >= 0:
            self.discarded += len(data)
            if self.discarded > MOST_DISCARDED:
                self.transport.abort()
            return
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # it became unreadable while it was answered: uvicorn can't answer 400 any more
            self.transport.abort()


class LingeringTransport:
    """The transport of a connection. uvicorn closes it after a response that ends the connection; while the client
    still sends the request, it is left to `BoundedProtocol`: a close would reset it, and the response with it."""

    def __init__(self, protocol: BoundedProtocol, transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._protocol.cycle is None or not self._protocol.cycle.more_body:
            self._transport.close()


class KeepsConnections:
    """An ASGI app whose clients know which response is the last of their connection, and lose no request on it.

    A response to a request with an unread body says that the connection is closed after it, as `BoundedProtocol` closes
    it. An error that the app has answered ends here: Starlette raises it once more, and uvicorn would close the
    connection, unannounced, under the next request."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        unread = headers.get(b"content-length", b"0") != b"0" or b"transfer-encoding" in headers
        answered = False

        async def received() -> Any:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def sent(message: Any) -> None:
            nonlocal answered
            if unread and message["type"] == "http.response.start":
                named = {name.lower() for name, _ in message["headers"]}
                more = []
                if b"connection" not in named:
                    more = [(b"connection", b"close")]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)
            answered = message["type"] == "http.response.body" and not message.get("more_body")

        try:
            await self.app(scope, received, sent)
        except Exception:
            if not answered:
                raise


class BoundedServer(uvicorn.Server):
    """Serves an ASGI app that logs requests and answers errors itself.

    uvicorn waits forever for the rest of a request, and for a client to read: this server looks at its connections ten
    times a second and closes those that are overdue. When no further connection would be accepted, it closes those
    first that have waited longest for a request, so that clients who send nothing keep nobody out.

    Args:
        app: the app to serve.
        read_seconds: time to receive the headers of a request, after which the connection is closed.
        connections: simultaneous connections; at most half of the files that this process may open.
        ending: is set when the server begins to shut down.
        idle_seconds: time between a response and the next request of the same connection; by default `read_seconds`.
    """

    def __init__(
        self,
        app: Any,
        read_seconds: float,
        connections: int,
        ending: asyncio.Event | None = None,
        idle_seconds: float | None = None,
    ) -> None:
        self.read_seconds = read_seconds
        self.idle_seconds = idle_seconds or read_seconds
        self.most = min(connections, max(1, raised_file_limit() // 2))
        self.ending = ending or asyncio.Event()
        super().__init__(
            uvicorn.Config(
                KeepsConnections(app),
                http=partial(BoundedProtocol, most=self.most),  # type: ignore[arg-type]  # uvicorn only calls it
                ws="none",
                lifespan="off",
                proxy_headers=False,
                server_header=False,
                access_log=False,
                log_config=None,
                log_level="critical",
                timeout_keep_alive=math.ceil(self.idle_seconds),
                timeout_graceful_shutdown=GRACE_SECONDS,
                # asyncio accepts so many before it looks at any of them
                backlog=min(MOST_ACCEPTED, max(1, self.most // 8)),
            )
        )
        self._since: dict[Any, tuple[Any, float]] = {}  # what each connection waits for, and since when

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(QUEUE)

    def end_on_signals(self) -> None:
        """Shut down on SIGINT or SIGTERM, on a second one at once."""

        def end(number: int, frame: Any) -> None:
            if self.should_exit:
                raise KeyboardInterrupt
            self.should_exit = True

        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)

    async def on_tick(self, counter: int) -> bool:
        """Close connections that are overdue, or that keep others out; called ten times a second."""
        now = asyncio.get_running_loop().time()
        before = self._since
        self._since = {}
        connections: set[Any] = self.server_state.connections
        idle: list[tuple[float, Any]] = []  # since when, of those that are not answered
        for connection in connections:
            cycle = connection.cycle
            transport = connection.transport
            reads = not connection.flow.write_paused
            answering = cycle is not None and not cycle.response_complete
            waits_for = cycle, answering, reads or transport.get_write_buffer_size()
            known, since = before.get(connection, (None, now))
            if known != waits_for:
                since = now
            self._since[connection] = waits_for, since
            between = cycle is not None and not cycle.more_body and not connection.conn.trailing_data[0]
            if not reads:
                seconds = WRITE_SECONDS
            elif answering:
                seconds = math.inf
            elif between:
                seconds = self.idle_seconds
            else:
                seconds = self.read_seconds
            if now - since > seconds:
                transport.abort()
            elif not answering or cycle.more_body:
                idle.append((since, connection))
        if len(connections) >= self.most:
            late = sorted((each for each in idle if now - each[0] > CROWDED_SECONDS), key=lambda each: each[0])
            for _, connection in late[: max(1, self.most // 4)]:
                connection.transport.abort()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End within `GRACE_SECONDS`, without waiting for clients that are still sending."""
        self.ending.set()
        connections: set[Any] = self.server_state.connections
        for connection in list(connections):
            if connection.cycle is not None and connection.cycle.more_body:
                connection.transport.abort()
        await super().shutdown(sockets)


class BoundedReader:
    """Lets requests in by their host, and reads their bodies.

    Args:
        hosts: names under which clients may address the server, besides its address and the loopback names.
        most: bytes of a body; all that are unanswered have at most 16 times as many.
        seconds: time to receive a body.
        spared: bytes of a body that are read however many others wait.
        busy: the status of a request for whose body there is no room.
        option: sets `most`, as a refusal says; empty: none does.

    Attributes: `held`, bytes of bodies that are unanswered.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        most: int,
        seconds: float,
        spared: int = 0,
        busy: int = 503,
        option: str = "--max-body-mb",
    ) -> None:
        self.hosts = {host.lower() for host in (*LOOPBACK_NAMES, *hosts)}
        self.most = most
        self.seconds = seconds
        self.spared = spared
        self.busy = busy
        self.held = 0
        self.option = f", {option}" if option else ""

    def admit(self, request: Request) -> None:
        """Raise HTTPException for a request to another host or of another site's page, before its body is read."""
        address = (request.scope.get("server") or ("",))[0]
        refusal = refused(request.headers, self.hosts | {address}, "start the server with --allow-host")
        if refusal:
            raise HTTPException(*refusal)

    @asynccontextmanager
    async def body(self, request: Request, limit: int) -> AsyncIterator[bytes]:
        """The body, of at most `limit` bytes, which is answered within the block."""
        body = bytearray()
        try:
            await self._read(request, body, limit)
            yield bytes(body)
        finally:
            self.held -= len(body)

    async def _read(self, request: Request, body: bytearray, limit: int) -> None:
        """Append the parts of the body to `body` as they arrive."""
        coding = request.headers.get("content-encoding", "")
        if coding not in ("", "identity"):
            raise HTTPException(415, f"Content-Encoding {coding!a:.40} is not read; send the body as it is")
        try:
            async with asyncio.timeout(self.seconds):
                while not request.scope.get(READ):
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise HTTPException(499, GONE)
                    part = message.get("body", b"")
                    request.scope[READ] = not message.get("more_body")
                    if self.held + len(part) > 16 * self.most and len(body) + len(part) > self.spared:
                        raise HTTPException(self.busy, "too many bytes of other requests wait", BUSY)
                    self.held += len(part)
                    body += part
                    if len(body) > limit:
                        option = self.option if limit == self.most else ""
                        raise HTTPException(413, f"the body has more than {limit >> 20} MiB{option}")
        except TimeoutError:
            request.scope[READ] = True
            reason = f"the body was not complete after {self.seconds:g} s"
            raise HTTPException(408, reason, {"Connection": "close"}) from None


def raised_file_limit() -> int:
    """Raise the limit of open files, often 1,024, as far as this process may: a thousand agents have a connection each.
    Returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        wanted = MOST_FILES
    else:
        wanted = min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    return soft


def require_secret(listening: socket.socket, host: str, secret: str, what: str, option: str) -> None:
    """Raise UserError if other machines can reach the socket and there is no secret that keeps them out."""
    if not secret and not is_loopback(listening.getsockname()[0]):
        reason = f"--host={host!r} can be reached from other machines, and needs a {what}"
        remedy = f"give {option} NAME, an environment variable with a {what}, or listen on 127.0.0.1"
        raise UserError(reason, remedy=remedy)


def bearer(request: Request) -> str:
    """The token in the header `Authorization`; empty without one."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        return ""
    return token.strip()


async def disconnected(request: Request) -> None:
    """Return when the client has disconnected; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
