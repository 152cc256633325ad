"""Settings of uvicorn, with limits on connections, for the servers of `proxima serve-reward` and `proxima view`."""

import asyncio
import json
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

WRITE_SECONDS = 30  # for a client that has stopped reading to resume


def server_config(app: Any, *, read_seconds: float, connections: int, **settings: Any) -> uvicorn.Config:
    """The settings of a server of `app`, an ASGI app that logs requests and answers errors itself.

    Args:
        read_seconds: time to receive the headers of a request; then the connection is closed.
        connections: simultaneous connections; a further one is closed.
        settings: further settings of uvicorn.
    """
    return uvicorn.Config(
        app,
        http=_connection(read_seconds, connections),
        ws="none",
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="critical",
        timeout_keep_alive=60,  # `_connection` has its own timeouts
        **settings,
    )


def _connection(read_seconds: float, connections: int) -> type[H11Protocol]:
    """uvicorn's protocol with deadlines for sending and reading clients; uvicorn itself waits forever."""

    class Connection(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._end_in(read_seconds)
            if len(self.connections) > connections:
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end_in(None)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._answering:
                self._end_in(None)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if not self._answering:  # deadline for the next request
                self._end_in(read_seconds)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._end_in(WRITE_SECONDS)

        def resume_writing(self) -> None:
            super().resume_writing()
            self._end_in(None)

        def send_400_response(self, msg: str) -> None:
            body = json.dumps({"error": msg}).encode()
            head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            self.transport.write(f"{head}Connection: close\r\n\r\n".encode() + body)
            self.transport.close()

        @property
        def _answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _end_in(self, seconds: float | None) -> None:
            if self.timer is not None:
                self.timer.cancel()
            self.timer = None if seconds is None else self.loop.call_later(seconds, self.transport.abort)

    return Connection
